"""What a run reports: metric lines, warnings, a progress display, and the environment it ran in."""

from __future__ import annotations

import json
import logging
import math
import platform
import resource
import shutil
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from flowgrpo.data import tables
from flowgrpo.errors import InputError
from flowgrpo.schema.readable import one_line
from flowgrpo.training.folders import replace_text

LIBRARIES = ("flowgrpo", "torch", "diffusers", "transformers", "accelerate", "peft", "safetensors", "numpy")

LOGGER = logging.getLogger("flowgrpo")


class Report:
    """Metric lines of a run, in a file, in the trackers and on the terminal. Only the main process writes.

    While it is entered, warnings of the logger `flowgrpo` go to `log.txt`, from every process, and to the terminal, from
    the main one.

    Args:
        folder: the run's folder.
        accelerator: its trackers get every number.
        iterations: how many the whole run has.
    """

    def __init__(self, folder: Path, accelerator: Accelerator, iterations: int):
        self.path, self.log = folder / "metrics.jsonl", folder / "log.txt"
        self.accelerator, self.iterations = accelerator, iterations
        self.lines: list[dict[str, Any]] = read_metrics(folder)
        self.console = Console(stderr=True, quiet=not accelerator.is_main_process)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[numbers]}"),
            console=self.console,
            disable=not self.console.is_terminal,
        )

    def forget_after(self, step: int) -> None:
        """Drop the lines of steps after a checkpoint's."""
        self.lines = [line for line in self.lines if line["step"] <= step]
        if self.accelerator.is_main_process:
            replace_text(self.path, "".join(json.dumps(line) + "\n" for line in self.lines))

    def __enter__(self) -> Report:
        file, terminal = logging.FileHandler(self.log, encoding="utf-8"), _Terminal(self.console)
        file.setFormatter(_Lines("%(asctime)s %(message)s"))
        terminal.setFormatter(_Lines())
        self._handlers = [file, terminal]
        for handler in self._handlers:
            LOGGER.addHandler(handler)
        return self

    def start(self, step: int) -> None:
        """Show the progress of a run that stands at `step`."""
        self._started, self._first = time.perf_counter(), step
        self._task = self._progress.add_task("training", total=self.iterations, completed=step, numbers="")
        self._progress.start()

    def __exit__(self, *error: object) -> None:
        self._progress.stop()
        for handler in self._handlers:
            LOGGER.removeHandler(handler)
            handler.close()

    def write(self, line: dict[str, Any]) -> None:
        """Append one line of numbers: to the file, to the trackers, to the terminal."""
        self.lines.append(line)
        if not self.accelerator.is_main_process:
            return
        with self.path.open("a") as file:
            file.write(json.dumps({k: _finite(v) for k, v in line.items()}) + "\n")
        numbers = {f"{line['phase']}/{k}": v for k, v in line.items() if isinstance(v, (int, float)) and k != "step"}
        self.accelerator.log(numbers, step=line["step"])
        self._show(line)

    def warn(self, sentence: str) -> None:
        """Say something that a person should look at, once for all processes."""
        if self.accelerator.is_main_process:
            LOGGER.warning("%s", sentence)

    def _show(self, line: dict[str, Any]) -> None:
        step = line["step"]
        if line["phase"] == "eval":
            self.console.print(
                f"step {step}: held-out reward [bold]{_number(line['reward/mean'])}[/bold]", highlight=False
            )
            return
        if line["phase"] == "calibration":
            self.console.print(f"noise levels calibrated in {line['time/calibration']:.0f} s", highlight=False)
            return
        seconds = [f"{line[f'time/{name}']:.1f}" for name in ("rollout", "reward", "update")]
        drift = line["policy/max_abs_log_ratio"]
        measured = "" if drift is None else f"  drift {drift:.0e}"
        numbers = f"reward {_number(line['reward/mean'])}{measured}  s {'/'.join(seconds)}"
        self._progress.update(self._task, completed=step, numbers=numbers)
        if not self.console.is_terminal:
            left = (time.perf_counter() - self._started) / max(step - self._first, 1) * (self.iterations - step)
            eta = f"{int(left) // 60}:{int(left) % 60:02d}"
            self.console.print(f"step {step}/{self.iterations}  {numbers}  ETA {eta}", highlight=False)


class _Lines(logging.Formatter):
    """A warning in one line, whatever is in it."""

    def format(self, record: logging.LogRecord) -> str:
        return one_line(super().format(record))


class _Terminal(logging.Handler):
    """Show warnings above the progress display."""

    def __init__(self, console: Console):
        super().__init__()
        self.console = console

    def emit(self, record: logging.LogRecord) -> None:
        self.console.print(Text.assemble(("warning", "yellow"), f" {self.format(record)}"), soft_wrap=True)


def _finite(value: Any) -> Any:
    """A value as JSON can hold it: None in place of NaN and infinity."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}"


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The metric lines of a run; none if it has none. A last line that was cut off is left out, with a warning.

    Raises:
        InputError: a line is broken, or says what no metric line says.
    """
    return [_checked(line, place) for place, line in tables.log(folder / "metrics.jsonl")]


def _checked(line: dict[str, Any], place: str) -> dict[str, Any]:
    if not isinstance(line.get("step"), int) or not isinstance(line.get("phase"), str):
        raise InputError(f"{place}: a line needs a step, a whole number, and a phase, a text")
    for key, value in line.items():
        if key != "phase" and value is not None and not is_number(value):
            raise InputError(f"{place}: {key} is {value!r}, not a number or null")
    return line


def is_number(value: Any) -> bool:
    """Whether a value of JSON is a number that can be computed with: not infinite, not NaN, no integer beyond floats."""
    return isinstance(value, int | float) and -1e300 < value < 1e300


def environment(accelerator: Accelerator) -> dict[str, Any]:
    """Versions, device and git commit, for `environment.json`."""
    device = accelerator.device
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "versions": {name: version(name) for name in LIBRARIES},
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "processes": accelerator.num_processes,
        "threads": torch.get_num_threads(),
        "git": _git("rev-parse", "HEAD"),
        "git_dirty": bool(_git("status", "--porcelain")),
    }


def _git(*arguments: str) -> str | None:
    """What git prints in the folder of this package, or None outside a checkout."""
    if shutil.which("git") is None:
        return None
    package = Path(__file__).parent
    result = subprocess.run(["git", *arguments], cwd=package, capture_output=True, text=True, check=False)
    return result.stdout.strip() if result.returncode == 0 else None


def peak_bytes(device: torch.device) -> int:
    """Most memory in use so far: of the GPU, or of this process on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale
