"""Measure what a command costs before it does anything: CPU seconds, wall seconds and peak memory of each, in Markdown.

    python research/bench_door.py [--repeats 5]

Each figure is the least of the repeats, every one a process of its own; peak memory is resident. Run it from the
repository's root: the configurations that are read are those of `configs`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time

COMMANDS = {
    "--help": ["--help"],
    "rewards": ["rewards"],
    "rewards shapes": ["rewards", "shapes"],
    "models": ["models"],
    "plan, refused key, flow": ["plan", "configs/shapes.yaml", "train.iteratons=4"],
    "plan, refused word, mdlm": ["plan", "configs/mdlm.yaml", "algorithm.objective=token_ration"],
    "plan, embedded pictures": ["plan", "configs/shapes.yaml"],
    "plan, embedded texts": ["plan", "configs/mdlm.yaml"],
}


def measured(arguments: list[str]) -> tuple[float, float, float]:
    """CPU seconds, wall seconds and peak MiB of one call of `flowgrpo`.

    Raises:
        RuntimeError: it ended as no command that is done or refused does.
    """
    started = time.perf_counter()
    command = [sys.executable, "-m", "flowgrpo", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.perf_counter() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode not in (0, 2):
        raise RuntimeError(f"flowgrpo {' '.join(arguments)} ended with status {process.returncode}")
    return usage.ru_utime + usage.ru_stime, wall, usage.ru_maxrss / 1024


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    print("| command | CPU s | wall s | peak MiB |\n|---|---|---|---|")
    for label, arguments in COMMANDS.items():
        runs = [measured(arguments) for _ in range(repeats)]
        cpu, wall, peak = (min(column) for column in zip(*runs, strict=True))
        print(f"| {label} | {cpu:.2f} | {wall:.2f} | {peak:.0f} |", flush=True)


if __name__ == "__main__":
    main()
