"""One process that asks math-verify whether two answers are the same; `rewards/texts/algebra.py` starts it.

Arguments: seconds for a question, and megabytes of address space. Output: a line that says `ready`, or why not. Then for
each line of input, JSON of two LaTeX texts with the right one first, a line of output: true, false, or null where
math-verify cannot read the right answer. A question that takes longer ends the process: computer algebra may be in C code
then, where nothing else would stop it.
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
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115, for whatever a library may print
    try:
        from math_verify import LatexExtractionConfig, parse, verify
    except Exception as error:  # whatever the packages that it needs may raise
        print(" ".join(f"{type(error).__name__}: {error}".split()), file=out, flush=True)
        return
    logging.disable()
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    def read(latex):
        """Without math-verify's own reading of plain arithmetic, which evaluates it as Python, and without its timer."""
        return parse(f"\\boxed{{{latex}}}", extraction_config=[LatexExtractionConfig()], parsing_timeout=None)

    verify(read("x^{2} + 1"), read("1 + x^{2}"), timeout_seconds=None)  # the first question of a process takes a second
    print("ready", file=out, flush=True)
    for line in sys.stdin:
        right, given = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, seconds)  # its signal ends a process that does not handle it
        expected = read(right)
        said = verify(expected, read(given), timeout_seconds=None) if expected else None
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(said), file=out, flush=True)


main()
