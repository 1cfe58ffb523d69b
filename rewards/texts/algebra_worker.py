"""The process in which `rewards/texts/algebra.py` asks math-verify if two answers are equal.

Arguments: seconds for a question, and megabytes of address space. The first line of output is `ready`, or the reason why
not. Then each line of input is JSON of two LaTeX texts, the right one first, and its line of output is true, false, or null
if math-verify cannot parse the right one. A question that takes longer ends the process, since computer algebra in C code
cannot be stopped otherwise.
"""

import json
import logging
import os
import resource
import signal
import sys


def main():
    """Answer until the input ends."""
    seconds, size = float(sys.argv[1]), int(sys.argv[2]) << 20
    out = os.fdopen(os.dup(1), "w")
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115, for prints of libraries
    try:
        from math_verify import LatexExtractionConfig, parse, verify
    except Exception as error:  # its dependencies may raise anything
        print(" ".join(f"{type(error).__name__}: {error}".split()), file=out, flush=True)
        return
    logging.disable()
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    def read(latex):
        # As LaTeX only, since math-verify evaluates plain arithmetic as Python. The timer is ours, not its own.
        return parse(f"\\boxed{{{latex}}}", extraction_config=[LatexExtractionConfig()], parsing_timeout=None)

    verify(read("x^{2} + 1"), read("1 + x^{2}"), timeout_seconds=None)  # the first question of a process takes a second
    print("ready", file=out, flush=True)
    for line in sys.stdin:
        right, given = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, seconds)  # its signal ends the process
        expected = read(right)
        same = verify(expected, read(given), timeout_seconds=None) if expected else None
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(same), file=out, flush=True)


main()
