"""Evaluate the metric lines of a run: held-out means, points of curves, and costs up to a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from flowgrpo.commands.page_parts.curve import PART, curve
from flowgrpo.commands.page_parts.numbers import Mean, counts

Metrics = Sequence[dict[str, Any]]

COSTS = {  # keys of training lines that add up to a cost; rewards are computed within the rollout
    "evaluations": ("cost/model_evaluations",),
    "seconds": ("time/rollout", "time/update"),
}


class PartCurve(NamedTuple):
    """Curve of one reward as an SVG element; a `watched` reward is evaluated but not trained on."""

    name: str
    watched: bool
    svg: str


def of_phase(metrics: Metrics, phase: str) -> list[dict[str, Any]]:
    """Return the lines of a phase: `calibration`, `train` or `eval`."""
    return [m for m in metrics if m["phase"] == phase]


def points(metrics: Metrics, phase: str, key: str) -> list[tuple[int, float]]:
    """Return the step and the value of each line of a phase that has a value."""
    return [(m["step"], m[key]) for m in of_phase(metrics, phase) if m.get(key) is not None]


def part_curves(
    metrics: Metrics, trained: Sequence[str], watched: Sequence[str], label: str = "reward by training step"
) -> list[PartCurve]:
    """Return a curve of each reward with two evaluations or more; none if there is only one reward.

    `{}` in `label` stands for the name of the reward.
    """
    names = [*trained, *watched]
    curves = []
    for name in names if len(names) > 1 else []:
        held_out, train = (points(metrics, phase, f"reward/{name}/mean") for phase in ("eval", "train"))
        if len(held_out) > 1:
            curves.append(PartCurve(name, name in watched, curve(held_out, train, PART, label=label.format(name))))
    return curves


def held_out_means(metrics: Metrics) -> list[Mean]:
    """Return the mean held-out totals of the first and the last evaluation (one if they are the same); [] if one is null."""
    evaluated = of_phase(metrics, "eval")
    ends = [evaluated[0], evaluated[-1]] if len(evaluated) > 1 else evaluated
    return [Mean.of(m) for m in ends] if all(m["reward/mean"] is not None for m in ends) else []


def held_out_words(metrics: Metrics) -> str | None:
    """Return the line on held-out rewards that is printed at the end of a run; None before the second evaluation."""
    evaluated = of_phase(metrics, "eval")
    if len(evaluated) < 2:
        return None
    before, after = (
        "none" if m["reward/mean"] is None else f"{m['reward/mean']:.3f}" for m in (evaluated[0], evaluated[-1])
    )
    means = held_out_means(metrics)
    unlike = len({mean.count for mean in means}) > 1
    return f"held-out reward {before} -> {after}" + (f" ({counts(*means)})" if unlike else "")


def training_cost(metrics: Metrics, cost: str, step: int | None = None) -> float:
    """Return what training cost, by a key of `COSTS`, up to and including a step; raise KeyError if a line lacks it."""
    train = of_phase(metrics, "train")
    return sum(m[key] for m in train for key in COSTS[cost] if step is None or m["step"] <= step)
