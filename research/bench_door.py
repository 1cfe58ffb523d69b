"""Measure the start-up cost of commands: CPU seconds, wall seconds and peak memory, as a table in Markdown.

    python research/bench_door.py [--repeats 5]

Each figure is the smallest of the repeats, which run in separate processes; peak memory is resident. Run it from the
repository's root, since it reads `configs`. A run ends at its first rollout, after an evaluation of few prompts. Python
stores bytecode even if PYTHONDONTWRITEBYTECODE is set, so that only the first repeat compiles this package.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

COMMANDS = {
    "--help": ["--help"],
    "rewards": ["rewards"],
    "rewards shapes": ["rewards", "shapes"],
    "models": ["models"],
    "plan, refused key, flow": ["plan", "configs/shapes.yaml", "train.iteratons=4"],
    "plan, refused word, mdlm": ["plan", "configs/mdlm.yaml", "algorithm.objective=token_ration"],
    "plan, embedded pictures": ["plan", "configs/shapes.yaml"],
    "plan, embedded texts": ["plan", "configs/mdlm.yaml"],
    "train to the first rollout, embedded pictures": ["train", "configs/shapes.yaml", "eval.prompts=1"],
    "train to the first rollout, embedded texts": ["train", "configs/mdlm.yaml", "eval.prompts=4", "run.processes=1"],
}
TO_FIRST_ROLLOUT = """
import os, sys
from flowgrpo.cli import main
from flowgrpo.training.loop import Loop
Loop.iterate = lambda self: os._exit(0)
sys.exit(main(sys.argv[1:]))
"""


def measured(arguments: list[str]) -> tuple[float, float, float]:
    """Return the CPU seconds, wall seconds and peak MiB of one call of `flowgrpo`.

    Raises:
        RuntimeError: its exit status is neither 0 (done) nor 2 (refused).
    """
    root = Path.cwd()
    program = ["-c", TO_FIRST_ROLLOUT] if arguments[0] == "train" else ["-m", "flowgrpo"]
    words = [str(root / word) if word.startswith("configs/") else word for word in arguments]
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": ""}
    with tempfile.TemporaryDirectory() as folder:  # a run writes its own folder there
        started = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, *program, *words],
            cwd=folder,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
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
