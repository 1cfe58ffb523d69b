"""Run the benchmarks that compare two ways of one commit, and say which ratios became worse.

    OMP_NUM_THREADS=1 python research/bench_all.py [--rounds N] [--json FILE] [--compare FILE] [--only flow]

Runs `bench_flow.py`, `bench_text.py` and `bench_run.py`, each in its own process, one after the other, and prints their
ratios in one table. (Not among them are `bench_finish.py` for cheap finishes and `bench_commits.py` for iterations of two
commits.)

`--compare` names every ratio that is worse than in the file: a cost that rose by more than 5 %, or a saving that fell
by more than 5 %. The exit status is 1 if there is one. A ratio whose quartiles include the old one is named as unsure,
and does not change the status. A change by less than 0.002 does not count, however small the ratio. Ratios of the file
that were not measured are named, too.

`--json docs/research/benchmarks.json` updates the file for later comparisons: new ratios replace old
ones, and the others stay.
All benchmarks take an hour and a quarter with `--rounds 2`. If Ctrl-C or an error ends them, the ratios measured so far
are printed, compared and written, and the status is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import paired
from paired import Ratio

SCRIPTS = ("flow", "text", "run")
WORSE = 0.05
LEAST = 0.002
SAVINGS = ("saving of",)  # words in the names of ratios of which more is better


def worse(before: Mapping[str, Ratio], now: Mapping[str, Ratio]) -> tuple[list[str], list[str]]:
    """Return sentences about ratios that became worse, and about those that perhaps did."""
    sure, unsure = [], []
    for name, new in now.items():
        if name not in before:
            continue
        old, more_is_better = before[name]["median"], any(word in name for word in SAVINGS)
        change = (new["median"] / old - 1) * (-1 if more_is_better else 1)
        if change <= WORSE or abs(new["median"] - old) < LEAST:
            continue
        reaches = new["high"] >= old if more_is_better else new["low"] <= old
        sentence = f"{name}: {old:.3f} before, {new['median']:.3f} now, {change:.0%} worse"
        (unsure if reaches else sure).append(sentence)
    return sure, unsure


class Ended(Exception):
    """A script ended before all was measured; `found` has the ratios measured so far."""

    def __init__(self, script: str, found: Mapping[str, Ratio]):
        super().__init__(f"bench_{script}.py ended after {len(found)} ratios")
        self.found = found


def measured(script: str, rounds: int | None) -> dict[str, Ratio]:
    """Run a script and return its ratios.

    Raises:
        Ended: the script was stopped, or failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "ratios.json"
        command = [sys.executable, str(Path(__file__).parent / f"bench_{script}.py"), "--json", str(out)]
        try:
            subprocess.run(
                [*command, *(["--rounds", str(rounds)] if rounds else [])], check=True, stdout=subprocess.DEVNULL
            )
        except (subprocess.CalledProcessError, KeyboardInterrupt) as error:
            raise Ended(script, json.loads(out.read_text())["ratios"] if out.exists() else {}) from error
        return json.loads(out.read_text())["ratios"]


def held(path: Path, option: str, parser: argparse.ArgumentParser) -> dict[str, Ratio]:
    """Return the ratios in a file; end the script if there are none."""
    try:
        return json.loads(path.read_text())["ratios"]
    except (OSError, ValueError, KeyError) as error:
        parser.error(f"{option}: {path} holds no ratios of this script ({error})")


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, help="pairs of each ratio; by default what each script takes")
    parser.add_argument("--json", type=Path, help="file that gets the ratios")
    parser.add_argument("--compare", type=Path, help="file of earlier ratios")
    parser.add_argument("--only", action="append", choices=SCRIPTS, help="all, unless some are named")
    options = parser.parse_args()
    before = None if options.compare is None else held(options.compare, "--compare", parser)
    kept = held(options.json, "--json", parser) if options.json is not None and options.json.exists() else {}
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    found: dict[str, Ratio] = {}
    ended = None
    for script in options.only or SCRIPTS:
        try:
            found |= measured(script, options.rounds)
        except Ended as error:
            found, ended = found | error.found, error
        if options.json is not None:
            options.json.write_text(json.dumps({"ratios": kept | found}, indent=1) + "\n")
        if ended:
            break
    print(paired.table(found))
    if ended:
        print(ended)
    if before is None:
        return 1 if ended else 0
    for name in found.keys() - before.keys():
        print(f"not in {options.compare}: {name}")
    for name in before.keys() - found.keys():
        print(f"not measured: {name}")
    sure, unsure = worse(before, found)
    print(
        "\n".join(["", *(f"worse: {sentence}" for sentence in sure), *(f"unsure: {sentence}" for sentence in unsure)])
    )
    compared = len(found.keys() & before.keys())
    print(f"{len(sure)} of {compared} ratios are worse by more than {WORSE:.0%}, {len(unsure)} perhaps")
    return 1 if sure or ended else 0


if __name__ == "__main__":
    sys.exit(main())
