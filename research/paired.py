"""Ratios of the times of two ways to do the same, measured in turns in one process; the benchmarks share this module.

Times are CPU seconds of one thread or, with a GPU, wall seconds until it has finished. Each round gives a ratio. The
scripts print the median and the quartiles over the rounds, the only reliable numbers on a machine that others use, too.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch reads it; also for processes that scripts start

import torch

from rewards.memory import keep_freed_memory

keep_freed_memory()  # as runs do; else page faults make turns of the same work differ by a quarter

Ratio = dict[str, float]  # median, low, high and pairs
Work = Callable[[], object]
METER = Path(__file__).with_name("meter.py")


@dataclass(frozen=True)
class Spent:
    """What a process took, with those that it started: wall and CPU seconds, and the peak resident bytes of the largest."""

    wall: float
    cpu: float
    peak: int


def spent(command: Sequence[str], **options: Any) -> Spent:
    """Run a command in a process of its own; `options` as of `subprocess.run`.

    Raises:
        SystemExit: the process failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "spent.json"
        metered = [sys.executable, "-S", str(METER), str(found), *command]
        done = subprocess.run(metered, capture_output=True, text=True, check=False, **options)
        if done.returncode:
            sys.exit(f"{' '.join(command)} ended with status {done.returncode}: {done.stderr.strip()[-500:]}")
        return Spent(**json.loads(found.read_text()))


@dataclass(frozen=True)
class Prepared:
    """Work with a preparation: `make` runs before each turn without being measured, and returns the measured work."""

    make: Callable[[], Work]


def cpu(work: Work) -> float:
    """Return the CPU seconds of a piece of work."""
    started = time.process_time()
    work()
    return time.process_time() - started


def seconds(work: Work) -> float:
    """Return the seconds of a piece of work: wall seconds with a GPU, else CPU seconds."""
    if not torch.cuda.is_available():
        return cpu(work)
    torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def wall(work: Work) -> float:
    """Return the wall seconds of a piece of work, for work that waits or uses several processes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def in_turns(
    works: Mapping[Any, Work | Prepared], rounds: int, clock: Callable[[Work], Any] = seconds
) -> dict[Any, list[Any]]:
    """Return what `clock` measures of each work in each round, after a warm-up; every second round runs in reverse order."""
    taken: dict[Any, list[Any]] = {name: [] for name in works}
    for turn in range(rounds + 1):
        for name in list(works)[:: 1 if turn % 2 else -1]:
            work = works[name]
            spent = clock(work.make() if isinstance(work, Prepared) else work)
            if turn:
                taken[name].append(spent)
    return taken


def paired(first: Sequence[float], second: Sequence[float]) -> Ratio:
    """Return the ratio of two works from their seconds in each round."""
    return spread([a / b for a, b in zip(first, second, strict=True)])


def spread(values: Sequence[float]) -> Ratio:
    """Return the median and the quartiles of values."""
    low, median, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return {"median": median, "low": low, "high": high, "pairs": len(values)}


def exactly(value: float) -> Ratio:
    """Return a ratio that is counted, not measured."""
    return {"median": value, "low": value, "high": value, "pairs": 0}


def table(ratios: Mapping[str, Ratio]) -> str:
    """Return ratios as a table in Markdown."""
    lines = ["| ratio | median | quartiles | pairs |", "|---|---|---|---|"]
    for name, ratio in ratios.items():
        quartiles = f"{ratio['low']:.3f} to {ratio['high']:.3f}" if ratio["pairs"] else "counted"
        lines.append(f"| {name} | {ratio['median']:.3f} | {quartiles} | {ratio['pairs'] or ''} |")
    return "\n".join(lines)


def parser(description: str, rounds: int) -> argparse.ArgumentParser:
    """Return a parser with the options that all of these scripts have."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--rounds", type=int, default=rounds, help=f"pairs of each ratio, {rounds} by default")
    made.add_argument("--json", type=Path, help="file that gets the ratios too")
    return made


def tell(ratios: Mapping[str, Ratio], options: argparse.Namespace, **further: Any) -> None:
    """Print the table and, with `--json`, write the ratios."""
    print(table(ratios))
    keep(ratios, options, **further)


def keep(ratios: Mapping[str, Ratio], options: argparse.Namespace, **further: Any) -> None:
    """With `--json`, write the command, the ratios and `further` entries, in the form that `bench_all.py --compare` reads.

    Scripts call it after each part, so that a stopped script leaves the ratios measured so far.
    """
    if options.json is not None:
        command = shlex.join(["python", *sys.argv])
        options.json.write_text(json.dumps({"command": command, "ratios": ratios, **further}, indent=1) + "\n")
