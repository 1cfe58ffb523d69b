"""Rewards of a run over its iterations: the curve of the total with its spread, and the table of evaluations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flowgrpo.commands.page_parts.curve import curve
from flowgrpo.commands.page_parts.history import Metrics, of_phase, points
from flowgrpo.commands.page_parts.numbers import Mean

MOST = 12  # rows of the table


@dataclass(frozen=True)
class Evaluation:
    """An evaluation on the held-out prompts: the mean total, if any, and the mean of each reward."""

    step: int
    mean: Mean | None
    parts: list[float | None]


def total_curve(metrics: Metrics) -> str | None:
    """Draw held-out totals with standard errors and training totals with deviations; None if neither has two points."""
    means = [(line["step"], mean) for line in of_phase(metrics, "eval") if (mean := _mean(line)) is not None]
    held_out = [(step, mean.value) for step, mean in means]
    train = points(metrics, "train", "reward/mean")
    if max(len(held_out), len(train)) < 2:
        return None
    errors = [
        (step, mean.value - mean.error, mean.value + mean.error) for step, mean in means if mean.error is not None
    ]
    deviations = [
        (line["step"], line["reward/mean"] - line["reward/std"], line["reward/mean"] + line["reward/std"])
        for line in of_phase(metrics, "train")
        if line.get("reward/mean") is not None and line.get("reward/std") is not None
    ]
    return curve(held_out, train, bands={"train": deviations, "held-out": errors})


def evaluations(metrics: Metrics, names: Sequence[str]) -> list[Evaluation]:
    """Return the evaluations, or `MOST` of them, evenly spaced with the first and the last."""
    every = [
        Evaluation(line["step"], _mean(line), [line.get(f"reward/{name}/mean") for name in names])
        for line in of_phase(metrics, "eval")
    ]
    if len(every) <= MOST:
        return every
    return [every[round(i * (len(every) - 1) / (MOST - 1))] for i in range(MOST)]


def _mean(line: dict[str, float]) -> Mean | None:
    return Mean.of(line) if line.get("reward/mean") is not None else None
