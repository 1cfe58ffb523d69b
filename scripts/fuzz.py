"""Feed malformed input of one kind to the code that reads it: each case must be accepted, or refused in one sentence.

    python scripts/fuzz.py {configs,media,folders,server,weights,loras,plugins,tables} [--seed 0] [--count N]

Exit status 1, with the smallest failing case, if a case ends in a traceback, is slow, or is refused in more than one
sentence. The cases are in tests/fuzzing; docs/research/reliability.md has the figures.
"""

import argparse
import importlib
import os
import sys
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

COUNTS = {"configs": 2000, "media": 2000, "folders": 1000, "server": 5000, "weights": 500, "loras": 500}
COUNTS |= {"plugins": 500, "tables": 2000}


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("subject", choices=COUNTS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, help="cases; " + ", ".join(f"{n} {name}" for name, n in COUNTS.items()))
    options = parser.parse_args(arguments)
    count = COUNTS[options.subject] if options.count is None else options.count
    found = importlib.import_module(f"fuzzing.{options.subject}").fuzz(options.seed, count)
    print(
        f"{found.subject}, seed {options.seed}: {found.cases} cases, {found.accepted} accepted, {found.refused} refused in "
        f"a sentence, {len(found.failures)} tracebacks, the slowest {found.slowest:.2f} s"
    )
    for failure in found.failures:
        print(failure, file=sys.stderr)
    return 1 if found.failures else 0


if __name__ == "__main__":
    sys.exit(main())
