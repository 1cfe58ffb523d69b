"""What the metric lines of a run tell: its held-out means, the points of its curves, and what each step had cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flowgrpo.commands.gallery.numbers import Mean, counts

Metrics = Sequence[dict[str, Any]]

COSTS = {  # keys of the training lines that add up to each cost; rewards are computed within the rollout
    "evaluations": ("cost/model_evaluations",),
    "seconds": ("time/rollout", "time/update"),
}


def points(metrics: Metrics, phase: str, key: str) -> list[tuple[int, float]]:
    """The step and the value of each line of a phase that has a value."""
    return [(m["step"], m[key]) for m in metrics if m["phase"] == phase and m.get(key) is not None]


def held_out_means(metrics: Metrics) -> list[Mean]:
    """The mean held-out reward of the first evaluation and the last, or of the only one; none where one has no value."""
    evaluated = [m for m in metrics if m["phase"] == "eval"]
    ends = [evaluated[0], evaluated[-1]] if len(evaluated) > 1 else evaluated
    return [Mean.of(m) for m in ends] if all(m["reward/mean"] is not None for m in ends) else []


def held_out_words(metrics: Metrics) -> str | None:
    """What a run says of its held-out rewards at its end; None before the second evaluation.

    A mean of other samples than the first one's is marked as one: where rewards failed or samples were lost, say.
    """
    evaluated = [m for m in metrics if m["phase"] == "eval"]
    if len(evaluated) < 2:
        return None
    before, after = (
        "none" if m["reward/mean"] is None else f"{m['reward/mean']:.3f}" for m in (evaluated[0], evaluated[-1])
    )
    means = held_out_means(metrics)
    unlike = len({mean.count for mean in means}) > 1
    return f"held-out reward {before} -> {after}" + (f" ({counts(*means)})" if unlike else "")


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
