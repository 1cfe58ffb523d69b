"""What the metric lines of a run tell: its held-out means, the points of its curves, and what each step had cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flowgrpo.commands.gallery.numbers import Mean

Metrics = Sequence[dict[str, Any]]

COSTS = {  # keys of the training lines that add up to each cost; rewards are computed within the rollout
    "evaluations": ("cost/model_evaluations",),
    "seconds": ("time/rollout", "time/update"),
}


def points(metrics: Metrics, phase: str, key: str) -> list[tuple[int, float]]:
    """The step and the value of each line of a phase that has a value."""
    return [(m["step"], m[key]) for m in metrics if m["phase"] == phase and m.get(key) is not None]


def held_out_means(metrics: Metrics) -> list[Mean]:
    """The mean held-out reward of each evaluation that has one."""
    return [Mean.of(m) for m in metrics if m["phase"] == "eval" and m["reward/mean"] is not None]


def trained_lines(metrics: Metrics) -> list[dict[str, Any]]:
    """The lines of training iterations, which know what they cost."""
    return [m for m in metrics if m["phase"] == "train"]


def spent(metrics: Metrics, cost: str, step: int | None = None) -> float:
    """What training had cost up to a step, and with it; by default up to the last one.

    Args:
        cost: `evaluations` of the model, or `seconds` of rollouts and updates. Held-out evaluations are not counted.

    Raises:
        KeyError: a line does not say what it cost.
    """
    return sum(m[key] for m in trained_lines(metrics) for key in COSTS[cost] if step is None or m["step"] <= step)
