"""Detection of iterations and runs that learnt nothing, and of the reason, from metric lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

ROUNDING = 1e-9  # smaller advantages are rounding errors of equal rewards


def is_idle(line: Mapping[str, Any]) -> bool:
    """Return whether an iteration learnt nothing: all advantages or gradients were 0, or no update was taken."""
    return not line["groups/teaching"] or not line["policy/updates"] or line["policy/grad_norm"] == 0


def is_sound(lines: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the weights after an iteration can be trusted.

    `lines` are the metric line of the iteration, and that of the evaluation after it, if any. The last line must have a
    mean reward. An iteration with nonzero advantages must have had an update.
    """
    stuck = lines[0]["groups/teaching"] and not lines[0]["policy/updates"]
    return lines[-1]["reward/mean"] is not None and not stuck


def why(line: Mapping[str, Any]) -> str:
    """Return why an iteration learnt nothing, as a phrase."""
    lost = line["reward/lost"]
    if line["reward/mean"] is None:
        return "every sample was lost" if lost else "no reward applies to any of its samples"
    if line["groups/teaching"]:
        if line["policy/updates"]:
            still = line["policy/grad_norm"] == 0
            return "the gradient of every update is 0" if still else "its learning rate is 0 (train.schedule.warmup)"
        skipped = line["policy/skipped_updates"]
        return "no update had a finite gradient" if skipped else "none of its samples can be trained on"
    return "the rewards of each group are equal" + (f", and {lost} samples were lost" if lost else "")


def never_learnt(lines: Sequence[Mapping[str, Any]], patience: int | None) -> str | None:
    """Return why no iteration of a complete run changed the weights; None if one did, or if `run.patience` is null."""
    trained = [line for line in lines if line["phase"] == "train"]
    # In the first step of a warm-up the learning rate is 0.
    moved_nothing = (is_idle(line) or line.get("policy/learning_rate") == 0 for line in trained)
    if patience is None or not trained or not all(moved_nothing):
        return None
    steps = f"any of its {len(trained)} steps" if len(trained) > 1 else "its only step"
    return f"nothing to learn in {steps}, {why(trained[-1])}"


def broken(lines: Sequence[Mapping[str, Any]], patience: int | None) -> str | None:
    """Return why the final weights of a run cannot be trusted; None if they can.

    Three things do not count: held-out rewards that were missing from the start, training samples to which no reward
    applies, and failed updates if `run.patience` is null.
    """
    trained, evaluated = ([line for line in lines if line["phase"] == phase] for phase in ("train", "eval"))
    if not trained:
        return None
    last = [line for line in (trained[-1], *evaluated) if line["step"] == trained[-1]["step"]]
    if is_sound(last):
        return None
    if last[-1]["phase"] == "eval" and last[-1]["reward/mean"] is None:
        return None if evaluated[0]["reward/mean"] is None else "no held-out sample has a reward any more"
    if last[0]["reward/mean"] is None:
        return why(last[0]) if last[0]["reward/lost"] else None
    return None if patience is None else why(last[0])


def teaches(objective: Any, advantages: torch.Tensor) -> torch.Tensor:
    """Return a mask (U,) of units with nonzero advantages; all units if the objective needs no rewards."""
    if not getattr(objective, "rewarded", True):
        return torch.ones_like(advantages, dtype=torch.bool)
    return advantages.isfinite() & (advantages.abs() > ROUNDING)
