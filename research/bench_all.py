"""Run the benchmarks whose ratios are of one commit, and say which became worse.

    OMP_NUM_THREADS=1 python research/bench_all.py [--rounds N] [--json FILE] [--compare docs/benchmarks.json] [--only flow]

Runs each of `bench_flow.py`, `bench_text.py` and `bench_run.py` in a process of its own, one after the other, and prints
their ratios as one table. (What cheap finishes cost, iterations of two commits, and single levers, `bench_finish.py`,
`bench_commits.py` and `bench_levers.py` measure by themselves.) `--compare` names every ratio whose cost rose by more
than 5 % over the one in the file, or of which a saving fell by more than 5 %, and the status is 1 if there is one; a
ratio whose quartiles reach back to the old one is named as unsure, and leaves the status. A change by less than 0.002 is
none, whatever part of a small ratio that is. What the file has and nothing has measured is named, too. `--json
docs/benchmarks.json` writes what later runs are compared with: what was measured takes the place of what the file holds
of it, and the rest stays. All of it takes an hour and a quarter with `--rounds 2`. Where Ctrl-C or an error ends it, what
was measured by then is told, compared and kept, with status 1.
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
SAVINGS = ("saving of",)  # words of ratios of which more is better


def worse(before: Mapping[str, Ratio], now: Mapping[str, Ratio]) -> tuple[list[str], list[str]]:
    """Sentences about ratios that became worse, and about those of which that is not sure."""
    sure, unsure = [], []
    for name, own in now.items():
        if name not in before:
            continue
        old, more_is_better = before[name]["median"], any(word in name for word in SAVINGS)
        change = (own["median"] / old - 1) * (-1 if more_is_better else 1)
        if change <= WORSE or abs(own["median"] - old) < LEAST:
            continue
        reaches = own["high"] >= old if more_is_better else own["low"] <= old
        sentence = f"{name}: {old:.3f} before, {own['median']:.3f} now, {change:.0%} worse"
        (unsure if reaches else sure).append(sentence)
    return sure, unsure


class Ended(Exception):
    """A script has ended before all was measured; `found` has what was."""

    def __init__(self, script: str, found: Mapping[str, Ratio]):
        super().__init__(f"bench_{script}.py ended after {len(found)} ratios")
        self.found = found


def measured(script: str, rounds: int | None) -> dict[str, Ratio]:
    """The ratios of a script.

    Raises:
        Ended: it was stopped, or failed.
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
    """The ratios that a file holds; ends the script where it holds none."""
    try:
        return json.loads(path.read_text())["ratios"]
    except (OSError, ValueError, KeyError) as error:
        parser.error(f"{option}: {path} holds no ratios of this script ({error})")


def main() -> int:
    """The command line."""
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
