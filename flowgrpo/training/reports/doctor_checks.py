"""Checks of `flowgrpo doctor` that flow models and language models share."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from typing import Any

import psutil
import torch

from flowgrpo.errors import InputError
from flowgrpo.training.reports.report import LOGGER, peak_bytes
from rewards import Reward
from rewards.audio import Films, tensors


@dataclass(frozen=True)
class Check:
    """One check of the doctor: a measurement, whether it passed, and advice."""

    name: str
    ok: bool
    value: str
    advice: str = ""  # of a check that passed: a warning
    _: KW_ONLY
    table: Sequence[dict[str, Any]] = ()  # details: rows with the same keys


def gap_of(a: torch.Tensor | Films, b: torch.Tensor | Films) -> float:
    """Return the largest difference between `a` and `b`, in standard deviations of `b`; infinity if shapes differ."""
    pairs = list(zip(tensors(a), tensors(b), strict=True))
    if any(x.shape != y.shape for x, y in pairs):
        return float("inf")
    return max(float((x - y).float().abs().max() / y.float().std().clamp_min(1e-12)) for x, y in pairs)


class _MessageCollector(logging.Handler):
    def __init__(self, level: int):
        super().__init__(level)
        self.heard: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.heard.append(record.getMessage())


@contextmanager
def warnings_heard() -> Iterator[list[str]]:
    """Yield a list that collects the warnings of the logger `flowgrpo` inside this context."""
    handler = _MessageCollector(logging.WARNING)
    LOGGER.addHandler(handler)
    try:
        yield handler.heard
    finally:
        LOGGER.removeHandler(handler)


def spread(rewards: Sequence[Reward], values: Sequence[torch.Tensor], warned: Sequence[str] = ()) -> Check:
    """Check that a reward with a weight varies within at least one group, and that there were no warnings.

    A constant reward beside it is named in the advice.

    `values` are the rewards (B, R) of each group, `warned` the warnings while they were computed.
    """
    largest = {}
    for k, reward in enumerate(rewards):
        stds = [float(v[:, k].std()) for v in values]
        largest[reward.name] = max((std for std in stds if std == std), default=0.0)
    flat = [name for name, std in largest.items() if std == 0]
    advice = (
        f"the reward {flat[0]!r} gave every sample of a group the same value, so nothing can be learnt from it: is it "
        "constant, saturated, or None for these prompts?"
        if flat
        else ""
    )
    ok = any(largest[reward.name] > 0 for reward in rewards if reward.weight) and not warned
    stds = ", ".join(f"{name} {std:.2g}" for name, std in largest.items())
    advice = "; ".join(dict.fromkeys(warned)) or advice
    return Check("group_spread", ok, f"standard deviation within {len(values[0])} samples: {stds}", advice)


def reloaded(gap: float, moved: float, what: str, advice: str) -> Check:
    """Check that saved and reloaded weights give the same `what` to within a tenth of what the change of weights moved."""
    ok = gap <= moved / 10
    value = f"saved and reloaded weights give the {what} to within {gap:.1e}, the limit is {moved / 10:.1e}"
    return Check("lora_reload", ok, f"{value}: a tenth of the change", "" if ok else advice)


def memory_left(device: torch.device, remedy: str, planned: Callable[[int], dict[str, Any]]) -> Check:
    """Check that the doctor used less than 90% of host and GPU memory; on a GPU, also report the run's planned peak.

    `remedy` is the advice for a failed check. `planned` returns the run's memory plan for a GPU with the given number of
    bytes.
    """
    host, total_host = psutil.Process().memory_info().rss, psutil.virtual_memory().total
    value = f"host {_gib(host)} of {_gib(total_host)} GiB"
    ok = host < 0.9 * total_host
    if device.type == "cuda":
        used, total = peak_bytes(device), torch.cuda.get_device_properties(device).total_memory
        value = f"GPU {_gib(used)} of {_gib(total)} GiB at its peak, {_format_peak(planned, total)}, {value}"
        ok = ok and used < 0.9 * total
    return Check("memory", ok, value, "" if ok else f"close to the limit: {remedy}")


def _format_peak(planned: Callable[[int], dict[str, Any]], total: int) -> str:
    """Return a phrase with the planned peak of the run and its phase, or with the reason why there is no plan."""
    try:
        phases = planned(total)["phases"]
    except (InputError, NotImplementedError) as error:  # as `training.planning.allocation_counter` raises it
        return f"a run's peak is unknown ({error})"
    highest = max(phases, key=lambda phase: phase["total"])
    return f"{_gib(highest['total'])} planned for a run, in the phase {highest['phase']}"


def seconds_of(work: Callable[[], Any]) -> float:
    """Call `work` twice and return the seconds of the second call, GPU work included."""
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started


def _gib(number: float) -> str:
    return f"{number / 2**30:.1f}"
