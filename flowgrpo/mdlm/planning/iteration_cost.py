"""Work of a language model's iteration (`flowgrpo plan CONFIG --gpus N`)."""

from __future__ import annotations

from typing import Any

from flowgrpo.mdlm.planning.memory_budget import TextBudget
from flowgrpo.training.planning.iteration_cost import Forward, Work, work_of


def work(budget: TextBudget, planned: dict[str, Any]) -> Work:
    """Return the work of an iteration, from the operations in `budget` and the counts in `planned`."""
    trial = budget.trial
    rollout, update, evaluate = (
        Forward(operations=operations, launches=trial.launches)
        for operations in (trial.decode_operations, trial.update_operations, trial.evaluate_operations)
    )
    numbers = 2 * len(budget.config.rewards) + 3
    return work_of(budget, planned, rollout=rollout, update=update, evaluate=evaluate, parts=1, numbers=numbers)
