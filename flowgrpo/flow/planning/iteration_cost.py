"""What an iteration of a flow model computes and sends, of which `flowgrpo plan CONFIG --gpus N` makes seconds."""

from __future__ import annotations

from typing import Any

from flowgrpo.flow.planning.memory_budget import FlowBudget
from flowgrpo.training.distributed.minibatches import kept_whole
from flowgrpo.training.planning.iteration_cost import Calls, Work, forwards_of


def work(budget: FlowBudget, planned: dict[str, Any]) -> Work:
    """The work of an iteration.

    Args:
        budget: of the run, with the operations of its calls.
        planned: the plan of the run, with its counts.
    """
    config, trial, g = budget.config, budget.trial, planned["geometry"]
    train, sampling = config.train, trial.rollout
    evaluating, evaluation = trial.evaluate or sampling, planned["evaluation"]
    trees = g["groups"] if kept_whole(train, config.algorithm) else g["groups"] * g["roots"]
    rows = g["samples"] * g["guidance_branches"]  # evaluations of one sweep
    sampled, updated = (planned["model_evaluations"][part] / rows for part in ("rollout", "update"))
    learnt = planned["with_gradient"] / rows
    dealt = {"units": trees, "width": g["samples"] // trees}
    replayed = {**dealt, "rows": train.update_rows, "parts": train.updates}
    held_out = {"units": evaluation["decoded"], "rows": train.rollout_rows}
    steps = evaluation["model_evaluations"] / max(1, evaluation["decoded"] * planned["evaluation_branches"])
    return Work(
        samples=g["samples"],
        calls={
            "rollout": [
                Calls(
                    **dealt,
                    sweeps=sampled,
                    rows=train.rollout_rows,
                    parts=train.updates,
                    operations=sampling.operations,
                    launches=sampling.launches,
                    gathers=sampling.calls,
                )
            ],
            "decode": [
                Calls(
                    units=trees,
                    width=-(-planned["decoded"] // trees),
                    sweeps=1,
                    rows=train.rollout_rows,
                    operations=sampling.decode_operations,
                )
            ],
            "update": [
                Calls(
                    **replayed,
                    sweeps=learnt,
                    operations=forwards_of(config) * sampling.operations,
                    launches=forwards_of(config) * sampling.launches,
                    gathers=2 * sampling.calls,  # the backward pass gathers them again
                    sums=sampling.calls,
                ),
                Calls(
                    **replayed,
                    sweeps=updated - learnt,
                    operations=sampling.operations,
                    launches=sampling.launches,
                    gathers=sampling.calls,
                ),
            ],
            "evaluate": [
                Calls(
                    **held_out,
                    sweeps=steps / config.eval.every,
                    operations=evaluating.operations,
                    launches=evaluating.launches,
                    gathers=evaluating.calls,
                ),
                Calls(**held_out, sweeps=1 / config.eval.every, operations=evaluating.decode_operations),
            ],
        },
        steps=train.updates,
        trees=trees,
        numbers=round(sampled) + 2 * len(config.rewards) + 2,
        networks=list(trial.shapes.values()),
        width=trial.width,
        trained=trial.trained,
    )
