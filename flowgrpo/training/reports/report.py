"""Reports of a run: metric lines, warnings, the progress display, and the environment."""

from __future__ import annotations

import json
import logging
import math
import os
import platform
import resource
import shutil
import subprocess
import sys
import threading
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker
from rich.text import Text
from typing_extensions import override

from flowgrpo.schema.imports.packages import installed
from flowgrpo.schema.readable import one_line
from flowgrpo.training.reports.progress import Display, duration, open_display
from flowgrpo.training.run import phases
from flowgrpo.training.run.run_files import read_metrics
from flowgrpo.training.run.run_folder import replace_text

LIBRARIES = ("flowgrpo", "torch", "diffusers", "transformers", "accelerate", "peft", "safetensors", "numpy")

LOGGER = logging.getLogger("flowgrpo")


class Report:
    """The metric lines of a run, which the main process writes to a file, to trackers and to the terminal.

    Inside this context, warnings of the logger `flowgrpo` on any process go to `log.txt`. Those of the main process go
    to the terminal, too.
    """

    def __init__(self, folder: Path, accelerator: Accelerator, iterations: int):
        self.path, self.log = folder / "metrics.jsonl", folder / "log.txt"
        self.accelerator, self.iterations = accelerator, iterations
        self.lines: list[dict[str, Any]] = read_metrics(folder)
        self.newest = max((line["step"] for line in self.lines), default=0)
        self.forwards: int | None = None  # forward passes of an iteration, to estimate the time before the first one
        self.display: Display
        self._started, self._first = 0.0, 0
        self._end: float | None = None
        self._entered = ExitStack()
        self._logging = threading.Lock()  # evaluations may come from another thread

    def forget_after(self, step: int) -> None:
        """Drop the metric lines of steps after `step`, on disk too."""
        self.lines = [line for line in self.lines if line["step"] <= step]
        self.newest = max(step, 0)
        if self.accelerator.is_main_process:
            replace_text(self.path, "".join(json.dumps(line) + "\n" for line in self.lines))

    def __enter__(self) -> Report:
        self.display = self._entered.enter_context(open_display(self.accelerator.is_main_process))
        file, terminal = _FileHandler(self.log, encoding="utf-8"), _TerminalHandler(self.display)
        file.setFormatter(_OneLineFormatter("%(asctime)s %(message)s"))
        terminal.setFormatter(_OneLineFormatter())
        self._handlers = [file, terminal]
        for handler in self._handlers:
            LOGGER.addHandler(handler)
        return self

    def start(self, step: int) -> None:
        """Show the progress from `step` on; the end of a resumed run is estimated from its earlier speed."""
        self._started, self._first = phases.clock(), step
        spent = sum(line.get(f"time/{part}", 0.0) for line in self.lines for part in ("rollout", "update", "eval"))
        if step:
            self._end = self._started + spent / step * (self.iterations - step)
        self.display.left = self._seconds_left
        self._show_step(step)

    def __exit__(self, *error: object) -> None:
        self.display.step = self.display.numbers = ""
        self.display.left = lambda: None
        self._entered.close()
        for handler in self._handlers:
            LOGGER.removeHandler(handler)
            handler.close()

    def write(self, line: dict[str, Any]) -> None:
        """Append one metric line to the file, the trackers and the terminal."""
        self.lines.append(line)
        if not self.accelerator.is_main_process:
            return
        with self.path.open("a") as file:
            finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in line.items()}
            file.write(json.dumps(finite) + "\n")
        numbers = {f"{line['phase']}/{k}": v for k, v in line.items() if isinstance(v, (int, float)) and k != "step"}
        with self._logging:
            self.newest = max(self.newest, line["step"])
            for tracker in self.accelerator.trackers:
                tracker.log(numbers, **place(tracker, line["step"], self.newest))
        self._show(line)

    def warn(self, sentence: str) -> None:
        """Log a warning from the main process."""
        if self.accelerator.is_main_process:
            LOGGER.warning("%s", sentence)

    def say(self, sentence: str) -> None:
        """Print information on the terminal."""
        if self.accelerator.is_main_process:
            self.display.print(sentence)

    def _show(self, line: dict[str, Any]) -> None:
        step = line["step"]
        if line["phase"] == "eval":
            self.display.print(f"step {step}: held-out reward {_number(line['reward/mean'])}{_each_reward(line)}")
            if step == self._first == self.newest:
                self._estimate_end(line)
            return
        if line["phase"] == "calibration":
            self.display.print(f"noise levels calibrated in {line['time/calibration']:.0f} s")
            return
        seconds = [f"{line[f'time/{name}']:.1f}" for name in ("rollout", "reward", "update")]
        drift = line["policy/max_abs_log_ratio"]
        measured = "" if drift is None else f"  drift {drift:.0e}"
        numbers = f"reward {_number(line['reward/mean'])}{measured}  s {'/'.join(seconds)}"
        now = phases.clock()
        self._end = end = now + (now - self._started) / max(step - self._first, 1) * (self.iterations - step)
        self.display.numbers = numbers
        self._show_step(step)
        if not self.display.interactive:
            self.display.print(f"step {step}/{self.iterations}  {numbers}  ETA {duration(end - phases.clock())}")

    def _show_step(self, step: int) -> None:
        self.display.step = f"step {min(step + 1, self.iterations)}/{self.iterations}"

    def _estimate_end(self, line: dict[str, Any]) -> None:
        self._started = phases.clock()
        if self.forwards is not None and line["cost/model_evaluations"]:
            each = line["time/eval"] / line["cost/model_evaluations"]
            self._end = self._started + self.forwards * each * (self.iterations - self._first)

    def _seconds_left(self) -> float | None:
        return None if self._end is None else max(self._end - phases.clock(), 0.0)


def place(tracker: GeneralTracker, step: int, newest: int) -> dict[str, Any]:
    """Return the step arguments for a tracker's `log`. wandb drops steps before `newest`, so it gets `newest` instead."""
    return {"step": None, "commit": False} if tracker.name == "wandb" and step < newest else {"step": step}


class _OneLineFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return one_line(super().format(record))


class _FileHandler(logging.FileHandler):
    """A file handler that raises errors, such as a full disk, instead of printing them."""

    @override
    def handleError(self, record: logging.LogRecord) -> None:
        raise


class _TerminalHandler(logging.Handler):
    def __init__(self, display: Display):
        super().__init__()
        self.display = display

    def emit(self, record: logging.LogRecord) -> None:
        self.display.print(Text.assemble(("warning", "yellow"), f" {self.format(record)}"))


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}"


def _each_reward(line: dict[str, Any]) -> str:
    """Return the mean of each reward of an evaluation, watched ones too; an empty text if there is only one reward."""
    keys = [key for key in line if key.startswith("reward/") and key.endswith("/mean") and key != "reward/mean"]
    means = [f"{key.removeprefix('reward/').removesuffix('/mean')} {_number(line[key])}" for key in keys]
    return f" ({', '.join(means)})" if len(means) > 1 else ""


def environment(accelerator: Accelerator) -> dict[str, Any]:
    """Return versions, device and git commit, for `environment.json`."""
    device = accelerator.device
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "versions": {name: installed(name) for name in LIBRARIES},
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "processes": accelerator.num_processes,
        "torchrun": os.environ.get("TORCHELASTIC_RUN_ID"),
        "threads": torch.get_num_threads(),
        "git": _git("rev-parse", "HEAD"),
        "git_dirty": bool(_git("status", "--porcelain")),
    }


@cache
def _git(*arguments: str) -> str | None:
    """Return git's output in this package's folder; None outside of a checkout or without git."""
    if shutil.which("git") is None:
        return None
    package = Path(__file__).parent
    result = subprocess.run(["git", *arguments], cwd=package, capture_output=True, text=True, check=False)
    return result.stdout.strip() if result.returncode == 0 else None


def lower_peak(device: torch.device) -> None:
    """Reset the peak memory that `peak_bytes` returns, where the system supports it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with suppress(OSError):  # not Linux
            Path("/proc/self/clear_refs").write_text("5")


def peak_bytes(device: torch.device) -> int:
    """Return the peak memory in bytes: of tensors on the GPU, or of this process on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale
