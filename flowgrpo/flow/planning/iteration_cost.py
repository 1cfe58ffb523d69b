"""The work of a flow model's iteration: model calls and their operations (`flowgrpo plan CONFIG --gpus N`).

Draws of final samples (`likelihood: elbo`) count as if the pipeline takes several noise levels in a call.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from flowgrpo.flow.planning.memory_budget import FlowBudget
from flowgrpo.flow.planning.memory_trace import Sampling
from flowgrpo.training.planning.iteration_cost import Calls, Forward, Work, work_of


def work(budget: FlowBudget, planned: dict[str, Any]) -> Work:
    """Return the work of an iteration, from the operations measured in `budget` and the counts in the plan `planned`."""
    config, sampling = budget.config, budget.trial.rollout
    train, evaluating, g = config.train, budget.trial.evaluate or sampling, planned["geometry"]
    rolled_out = planned["model_evaluations"]["rollout"] / g["guidance_branches"]
    evaluations = rolled_out / g["samples"]
    # Steps that keep their graphs for the update are not captured.
    captured = (1 - sum(budget.graphs) / rolled_out) * config.model.cuda_graphs
    iteration = work_of(
        budget,
        planned,
        rollout=_step(sampling, captured=captured),
        update=_step(sampling),
        evaluate=_step(evaluating, captured=float(config.model.cuda_graphs)),
        parts=train.updates,
        numbers=round(evaluations) + 2 * len(config.rewards) + 2,
    )
    decode = Calls(
        units=iteration.trees,
        width=-(-planned["decoded"] // iteration.trees),
        sweeps=1,
        rows=train.rollout_rows,
        operations=sampling.decode_operations,
    )
    decode_held_out = Calls(
        units=planned["evaluation"]["decoded"],
        sweeps=1 / config.eval.every,
        rows=train.rollout_rows,
        operations=evaluating.decode_operations,
    )
    calls = {**iteration.calls, "decode": [decode], "evaluate": [*iteration.calls["evaluate"], decode_held_out]}
    if config.algorithm.likelihood.name == "elbo":
        draws = max(1, round(g["trained_edges"] / g["samples"]))
        calls["update"] = [
            replace(each, width=each.width * draws, sweeps=each.sweeps / draws) for each in calls["update"]
        ]
    return replace(iteration, calls=calls)


def _step(sampling: Sampling, *, captured: float = 0.0) -> Forward:
    """Return the work of a step, of whose calls the share `captured` is launched at once (`model.cuda_graphs`)."""
    launches = round(captured * sampling.calls + (1 - captured) * sampling.launches)
    return Forward(operations=sampling.operations, launches=launches, networks=sampling.calls)
