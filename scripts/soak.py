"""Kill very small runs at random moments, damage their checkpoints, and compare resumed runs with undisturbed ones.

    python scripts/soak.py [--seed 0] [--cases 40 | --minutes M] [--only N]

A case runs the real command in one or two processes, ends it several times (SIGKILL of one process, of the launcher or
of all, SIGTERM, SIGINT), and changes, truncates or deletes checkpoint files. The result must be bitwise equal in
weights, optimizer, generators, metrics and samples, or the resume must be refused in one sentence with nothing changed.
Prints a table; exit status 1, with seed and steps, otherwise. The cases are in tests/soaking;
docs/research/reliability.md has the figures.
"""

import argparse
import itertools
import math
import os
import signal
import sys
import tempfile
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, help="how many; 40 unless minutes are given")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no case after so many")
    parser.add_argument("--only", type=int, metavar="N", help="this one case")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="number of the first case")
    options = parser.parse_args(arguments)
    from soaking import runner

    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs and their children ignore it
    count = options.cases or (40 if math.isinf(options.minutes) else None)
    numbers = itertools.islice(itertools.count(options.first), count) if options.only is None else iter([options.only])
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        found = runner.run(
            options.seed, Path(folder), lambda words: print(words, flush=True), numbers=numbers, minutes=options.minutes
        )
    print(runner.table(found))
    return 1 if any(case.failure for case in found) else 0


if __name__ == "__main__":
    sys.exit(main())
