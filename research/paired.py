"""Ratios of what two ways of doing the same take, measured in turns in one process: for the scripts that measure.

Times are CPU seconds of one thread, or where a GPU works wall seconds after it has ended. A ratio is of one round, and told
are the median over the rounds and their quartiles: only these mean anything on a machine that others use too.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch asks, and for the processes that scripts start

import torch

from rewards.memory import keep_freed_memory

keep_freed_memory()  # as runs do; else turns of the same work differ by a quarter, by pages that come and go

Ratio = dict[str, float]  # median, low, high and pairs
Work = Callable[[], object]


@dataclass(frozen=True)
class Prepared:
    """Work that is prepared before each turn, which does not count: `make` gives what counts."""

    make: Callable[[], Work]


def cpu(work: Work) -> float:
    """CPU seconds of a piece of work."""
    started = time.process_time()
    work()
    return time.process_time() - started


def seconds(work: Work) -> float:
    """What a piece of work takes: wall seconds with a GPU, else CPU seconds."""
    if not torch.cuda.is_available():
        return cpu(work)
    torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def wall(work: Work) -> float:
    """Wall seconds of a piece of work that waits, or works in several processes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def in_turns(
    works: Mapping[str, Work | Prepared], rounds: int, clock: Callable[[Work], float] = seconds
) -> dict[str, list[float]]:
    """Seconds of each work in each round, after one that is not counted; every other round goes backwards."""
    taken: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(rounds + 1):
        for name in list(works)[:: 1 if turn % 2 else -1]:
            work = works[name]
            spent = clock(work.make() if isinstance(work, Prepared) else work)
            if turn:
                taken[name].append(spent)
    return taken


def paired(first: Sequence[float], second: Sequence[float]) -> Ratio:
    """The ratio of what took so many seconds in each round to what took so many in the same."""
    return spread([a / b for a, b in zip(first, second, strict=True)])


def spread(values: Sequence[float]) -> Ratio:
    """Median and quartiles of values."""
    low, median, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return {"median": median, "low": low, "high": high, "pairs": len(values)}


def exactly(value: float) -> Ratio:
    """A ratio that is counted, not measured."""
    return {"median": value, "low": value, "high": value, "pairs": 0}


def table(ratios: Mapping[str, Ratio]) -> str:
    """Ratios as a table in Markdown."""
    lines = ["| ratio | median | quartiles | pairs |", "|---|---|---|---|"]
    for name, own in ratios.items():
        quartiles = f"{own['low']:.3f} to {own['high']:.3f}" if own["pairs"] else "counted"
        lines.append(f"| {name} | {own['median']:.3f} | {quartiles} | {own['pairs'] or ''} |")
    return "\n".join(lines)


def parser(description: str, rounds: int) -> argparse.ArgumentParser:
    """The options that all of these scripts have."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--rounds", type=int, default=rounds, help=f"pairs of each ratio, {rounds} by default")
    made.add_argument("--json", type=Path, help="file that gets the ratios too")
    return made


def tell(ratios: Mapping[str, Ratio], options: argparse.Namespace, **further: Any) -> None:
    """Print the table, and keep it."""
    print(table(ratios))
    keep(ratios, options, **further)


def keep(ratios: Mapping[str, Ratio], options: argparse.Namespace, **further: Any) -> None:
    """With `--json` write what `bench_all.py --compare` reads: the command, the ratios, and what else.

    It is called after each part, so that a script that is stopped leaves what it has measured.
    """
    if options.json is not None:
        command = shlex.join(["python", *sys.argv])
        options.json.write_text(json.dumps({"command": command, "ratios": ratios, **further}, indent=1) + "\n")
