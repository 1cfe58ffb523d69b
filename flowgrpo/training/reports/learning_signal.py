"""Whether an iteration learnt anything, by its metric line, and why not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

ROUNDING = 1e-9  # an advantage below it is what sums of equal rewards leave


def is_idle(line: Mapping[str, Any]) -> bool:
    """Whether an iteration learnt nothing: no advantage or no gradient was other than 0, or no update could be made."""
    return not line["groups/teaching"] or not line["policy/updates"] or line["policy/grad_norm"] == 0


def moved_nothing(line: Mapping[str, Any]) -> bool:
    """Whether an iteration left the weights as they were; where it learnt, because a warm-up begins with a rate of 0."""
    return is_idle(line) or line.get("policy/learning_rate") == 0


def is_sound(lines: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the weights after an iteration can be trusted, by its metric line and that of an evaluation after it, if any.

    The samples that were seen last must have rewards, and what the iteration had to teach must have been learnt.
    """
    stuck = lines[0]["groups/teaching"] and not lines[0]["policy/updates"]
    return lines[-1]["reward/mean"] is not None and not stuck


def why(line: Mapping[str, Any]) -> str:
    """Why an iteration had nothing to learn."""
    lost = line["reward/lost"]
    if line["reward/mean"] is None:
        return "every sample was lost" if lost else "no reward applies to any of its samples"
    if line["groups/teaching"]:
        if line["policy/updates"]:
            still = line["policy/grad_norm"] == 0
            return "the gradient of every update is 0" if still else "its learning rate is 0 (train.schedule.warmup)"
        skipped = line["policy/skipped_updates"]
        return "no update had a gradient that is finite" if skipped else "nothing of its samples can be trained on"
    return "the rewards of each group are equal" + (f", and {lost} samples were lost" if lost else "")


def never_learnt(lines: Sequence[Mapping[str, Any]], patience: int | None) -> str | None:
    """Why a run that took all its iterations moved its weights in none of them; None if it did, or may have waited.

    Args:
        lines: metric lines of the whole run.
        patience: `run.patience`.
    """
    trained = [line for line in lines if line["phase"] == "train"]
    if patience is None or not trained or not all(moved_nothing(line) for line in trained):
        return None
    return f"nothing to learn in any of its {len(trained)} steps, {why(trained[-1])}"


def broken(lines: Sequence[Mapping[str, Any]], patience: int | None) -> str | None:
    """Why the weights that a run ends with cannot be trusted; None where they can.

    Rewards that were never there, in training or in evaluations, tell nothing of the weights. Without patience updates that
    could not be made are no reason, for samples of the weights have rewards.

    Args:
        lines: metric lines of the whole run.
        patience: `run.patience`.
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
    """Whether (U,) bool units of these advantages have something to teach: all, where the objective asks for no rewards."""
    if not getattr(objective, "rewarded", True):
        return torch.ones_like(advantages, dtype=torch.bool)
    return advantages.isfinite() & (advantages.abs() > ROUNDING)
