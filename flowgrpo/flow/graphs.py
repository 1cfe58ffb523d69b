"""Graphs that a rollout keeps of its own evaluations, so that the first update of an iteration calls no network for them.

Until the first optimizer step of an iteration the weights are those that rolled out: the calls of that update would be the
rollout's own once more, and their ratios 1. Where the rollout keeps the graphs of the evaluations that it trains on
(`samplers.trees.Evaluation.velocity`), the update only sends the loss backward through them, one evaluation with all the
edges that leave it; gradients are those of a replay to the bit. Later updates of the iteration stand on other weights, and
replay as ever.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from flowgrpo.schema.heavy import torch
from flowgrpo.schema.lazy import lazy
from flowgrpo.schema.sections import AUTO
from rewards.memory import is_out_of_memory

if TYPE_CHECKING:
    import psutil

    from flowgrpo.data.prompts import Row
    from flowgrpo.flow.pipeline.policy import Policy
    from flowgrpo.training import live, probing
    from flowgrpo.training.exchange import Exchange
    from samplers.kernels import State
    from samplers.trees import Tree
else:
    psutil = lazy("psutil")
    live = lazy("flowgrpo.training.live")
    probing = lazy("flowgrpo.training.probing")

LOGGER = logging.getLogger(__name__)
ROOM = 0.5  # of the memory that is free, which graphs may take


def hindrance(config: Any) -> str | None:
    """The setting, as it is written, for which the first update calls the model anew; None if it may use kept graphs.

    Args:
        config: of a run.
    """
    train, run, algorithm = config.train, config.run, config.algorithm
    rule = getattr(algorithm.tree, "prune", None)
    found = {
        "algorithm.likelihood=elbo": algorithm.likelihood.name == "elbo",  # of noised samples, which no rollout met
        "run.engine": run.engine is not None,
        f"run.staleness={run.staleness}": run.staleness > 0,
        f"run.generators={run.generators}": run.generators > 0,
        f"run.sharding={run.sharding}": run.sharding != "none",
        "model.offload_activations=true": config.model.offload_activations,
        # What leaves the update is gathered into fewer calls, which costs less than full ones sent backward.
        f"algorithm.tree.prune.rule={rule and rule.rule}": rule is not None,
        "algorithm.baseline.drop_zero=true": algorithm.baseline.drop_zero,
        "train.select": train.select is not None,
        "train.split=edges": train.split == "edges",
        # Sizes that are found one by one may differ.
        f"train.rollout_batch={train.rollout_batch}": train.rollout_rows != train.update_rows
        or (train.rollout_batch is not None and AUTO in (train.rollout_batch, train.micro_batch)),
    }
    return next((setting for setting, hinders in found.items() if hinders), None)


def kept_parts(config: Any, policy: Policy, row: Row, *, rows: int, exchange: Exchange, peak: int = 0) -> Sequence[int]:
    """The parts of an iteration's update whose graphs rollouts keep: the first or none, on all processes alike.

    Args:
        config: of the run.
        row: that is tried where memory decides, best the longest.
        rows: of this process, whose graphs would be kept.
        exchange: of the processes, which are taken to share the memory of a host.
        peak: bytes at the most in calls of the sizes that the run has found; 0 where sizes are given.
    """
    if config.train.replay != "auto" or hindrance(config):
        return (0,) if config.train.replay == "never" else ()
    state = policy.start([row])
    try:
        need = rows * graph_bytes(policy, state, row)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        need = math.inf  # an update will say so, in its own phase
    device = state[0].device
    beside = max(0, peak - probing.taken_bytes(device)) if peak else 0
    free = _free(device) / exchange.accelerator.num_processes - beside
    short = float(exchange.sum(torch.tensor(float(need > ROOM * free))))
    LOGGER.info(
        "graphs of %d rows take %.2f GiB of %.2f: %s", rows, need / 2**30, free / 2**30, "replay" if short else "keep"
    )
    return () if short else (0,)


def drop(tree: Tree) -> None:
    """Let go of the graphs of a tree."""
    for evaluation in tree.evaluations:
        evaluation.velocity = None


def _free(device: torch.device) -> int:
    """Bytes of memory that can be allocated on a device."""
    if device.type != "cuda":
        return psutil.virtual_memory().available
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def graph_bytes(policy: Policy, state: State, row: Row) -> int:
    """Bytes that the graph of one row's velocity keeps beside the weights, by running it."""
    with torch.enable_grad(), live.Live() as counted:
        for network in policy.modules.values():
            for tensor in (*network.parameters(), *network.buffers()):
                counted.ignore(tensor)
        counted.restart()
        velocity = policy.velocity(state, policy.sigmas[0], [row])
        held = counted.now
        del velocity
    return held
