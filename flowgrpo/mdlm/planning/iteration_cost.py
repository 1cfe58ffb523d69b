"""What an iteration of a language model computes and sends, of which `flowgrpo plan CONFIG --gpus N` makes seconds."""

from __future__ import annotations

from typing import Any

from flowgrpo.mdlm.planning.memory_budget import TextBudget
from flowgrpo.training.distributed.minibatches import kept_whole
from flowgrpo.training.planning.iteration_cost import Calls, Work, forwards_of


def work(budget: TextBudget, planned: dict[str, Any]) -> Work:
    """The work of an iteration; where the plan's counts are the most, this is the most.

    Args:
        budget: of the run, with the operations of its calls.
        planned: the plan of the run, with its counts.
    """
    config, trial, g = budget.config, budget.trial, planned["geometry"]
    train, evaluation, samples = config.train, planned["evaluation"], g["samples"]
    steps = evaluation["model_evaluations"] / max(1, evaluation["decoded"] * planned["evaluation_branches"])
    learnt = planned["with_gradient"] / (samples * g["views"])
    updated = planned["model_evaluations"]["update"] / (samples * g["views"])
    dealt = g["groups"] if kept_whole(train, config.algorithm) else samples
    together = samples // dealt
    views = {"units": dealt, "width": together * g["views"], "rows": train.update_rows, "parts": train.updates}
    return Work(
        samples=samples,
        calls={
            "rollout": [
                Calls(
                    units=dealt,
                    width=together,
                    sweeps=planned["model_evaluations"]["rollout"] / (samples * g["guidance_branches"]),
                    rows=train.rollout_rows,
                    operations=trial.decode_operations,
                    launches=trial.launches,
                    gathers=1,
                )
            ],
            "update": [
                Calls(
                    **views,
                    sweeps=learnt,
                    operations=forwards_of(config) * trial.update_operations,
                    launches=forwards_of(config) * trial.launches,
                    gathers=2,  # the backward pass gathers them again
                    sums=1,
                ),
                Calls(
                    **views,
                    sweeps=updated - learnt,
                    operations=trial.update_operations,
                    launches=trial.launches,
                    gathers=1,
                ),
            ],
            "evaluate": [
                Calls(
                    units=evaluation["decoded"],
                    sweeps=steps / config.eval.every,
                    rows=train.rollout_rows,
                    operations=trial.evaluate_operations,
                    launches=trial.launches,
                    gathers=1,
                )
            ],
        },
        steps=train.updates * train.passes,
        trees=dealt,
        numbers=2 * len(config.rewards) + 3,
        networks=[trial.shapes],
        width=trial.width,
        trained=trial.trained,
    )
