"""What a run tells: metric lines, a progress display, and the environment it ran in."""

from __future__ import annotations

import json
import math
import os
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

LIBRARIES = ("flowgrpo", "torch", "diffusers", "transformers", "accelerate", "peft", "safetensors", "numpy")


class Report:
    """Metric lines of a run, in a file, in the trackers and on the terminal. Only the main process writes.

    Args:
        folder: the run's folder.
        accelerator: its trackers get every number.
        iterations: how many the whole run has.
    """

    def __init__(self, folder: Path, accelerator: Accelerator, iterations: int):
        self.path = folder / "metrics.jsonl"
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
            text = "".join(json.dumps(line) + "\n" for line in self.lines)
            partial = self.path.with_suffix(".partial")
            partial.write_text(text)
            os.replace(partial, self.path)

    def __enter__(self) -> Report:
        return self

    def start(self, step: int) -> None:
        """Show the progress of a run that stands at `step`."""
        self._started, self._first = time.perf_counter(), step
        self._task = self._progress.add_task("training", total=self.iterations, completed=step, numbers="")
        self._progress.start()

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

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
        """Say something that a person should look at."""
        self.console.print("warning", style="yellow", end=" ")
        self.console.print(sentence, highlight=False, markup=False, emoji=False, soft_wrap=True)

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


def _finite(value: Any) -> Any:
    """JSON knows neither NaN nor infinity; what has no value is null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}"


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The complete metric lines of a run; a line cut off by a crash is left out."""
    path = folder / "metrics.jsonl"
    if not path.is_file():
        return []
    lines = path.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n") and line.strip()]


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
    """What git says of the place this package lies in, or None outside a checkout."""
    if shutil.which("git") is None:
        return None
    place = Path(__file__).parent
    result = subprocess.run(["git", *arguments], cwd=place, capture_output=True, text=True, check=False)
    return result.stdout.strip() if result.returncode == 0 else None


def peak_bytes(device: torch.device) -> int:
    """Most memory in use so far: of the GPU, or of this process on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale
