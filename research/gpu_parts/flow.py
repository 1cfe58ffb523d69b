"""Calls of flow models with the shapes of real ones and random weights: what is planned, and what a GPU takes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import flow_sizes
import random_pipelines
import torch
from flow_sizes import Size

from flowgrpo.data.prompts import Row
from flowgrpo.errors import InputError
from flowgrpo.flow.pipeline.networks.attention import set_attention, try_attention
from flowgrpo.flow.pipeline.networks.captured_calls import CapturedCalls
from flowgrpo.flow.pipeline.networks.compiled_blocks import CompiledBlocks
from flowgrpo.flow.planning import iteration_cost
from flowgrpo.flow.planning.memory_budget import budget_of
from flowgrpo.flow.planning.plan import plan
from flowgrpo.training.weights import low_precision_copies, low_precision_layers
from flowgrpo.training.weights.low_precision_copies import LowPrecision
from gpu_parts import iteration

STEPS = 3  # of a schedule: calls are the same in a longer one


def size_of(name: str, *, shrunk: bool) -> Size:
    """Return the measured size: a group of 8 samples in `STEPS` steps, or a small one."""
    if shrunk:
        return flow_sizes.shrunk(name)
    return replace(flow_sizes.SIZES[name], group=8, call={"num_inference_steps": STEPS})


def planned(name: str, rows: Sequence[int], *, shrunk: bool = False) -> dict[str, Any]:
    """Return `iteration.by_rows` of a size; no GPU is needed."""
    size = size_of(name, shrunk=shrunk)
    chosen = flow_sizes.settings(size, "chain", max(rows))
    with random_pipelines.folder(chosen.model.path, size.changes) as folder:
        model = chosen.model.model_copy(update={"path": str(folder), "text_encoders": "keep"})
        with budget_of(chosen.model_copy(update={"model": model})) as budget:
            counted = iteration.by_rows(budget, lambda each: iteration_cost.work(each, plan(each.config)), rows)
    return {"dtype": size.dtype, "samples": size.group, "rows": counted}


def measured(
    name: str,
    rows: int,
    *,
    attention: str | None = None,
    compiled: bool = False,
    captured: bool = False,
    graphs: bool = False,
    shrunk: bool = False,
) -> dict[str, Any]:
    """Return `iteration.measure` of chains in calls of `rows`, with the levers that are given.

    Args:
        attention: backend of the attention, tried before the model is built.
        compiled: compile the blocks of the network.
        captured: replay the calls of rollouts as CUDA graphs; raises RuntimeError where the network has none.
        graphs: keep the graphs of the rollout for the update.
    """
    size, device = size_of(name, shrunk=shrunk), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if attention is not None:
        try_attention(attention, size.dtype, device)
    policy, weights = iteration.build_once(name, lambda: flow_sizes.begun(size))
    networks = list(policy.modules.values())
    loop = flow_sizes.trainer_of(policy, weights, flow_sizes.settings(size, "chain", rows))
    asked = [Row("a red circle", seed) for seed in range(rows)]
    decode = torch.no_grad()(partial(policy.decode, policy.start(asked), asked))
    replayed = None
    try:
        if attention is not None:
            set_attention(networks, attention)
        if compiled:
            CompiledBlocks(networks)
        replayed = CapturedCalls(networks) if captured else None
        found = iteration.measure(loop, networks[0], decode, keeps_graphs=graphs)
        if replayed is not None and not replayed.replays:
            raise RuntimeError("the network has no CUDA graphs")
        return found
    finally:
        if replayed is not None:
            replayed.give_up("they are measured")
        if attention is not None:
            networks[0].reset_attention_backend()
        if compiled:
            iteration.forget()  # blocks stay compiled


@torch.no_grad()
def finished(name: str, rows: int, *, compiled: bool = False, shrunk: bool = False) -> dict[str, Any]:
    """Return `layers`: what ODE steps of `rows` samples take by the network, and by its copies in int8 and fp8.

    Each has the numbers of `iteration.timed`, and `drift`: the root mean square of the difference between its end and the
    network's, over that of the steps. A precision that the device does not multiply in has an `error` instead. With
    `compiled` the blocks of the network are compiled.
    """
    size, device = size_of(name, shrunk=shrunk), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    policy, weights = iteration.build_once(name, lambda: flow_sizes.begun(size))
    networks = list(policy.modules.values())
    flow_sizes.trainer_of(policy, weights, flow_sizes.settings(size, "chain", rows))
    asked = [Row("a red circle", seed) for seed in range(rows)]
    start = policy.start(asked)
    finish = partial(policy.finish, start, policy.sigmas, asked)
    try:
        if compiled:
            CompiledBlocks(networks)
        whole, exact = finish(), iteration.timed(finish)
        found: dict[str, dict[str, Any]] = {size.dtype: {**exact, "drift": 0.0}}
        walked = _norm(a - b for a, b in zip(whole, start, strict=True))
        for word in low_precision_copies.EIGHT_BITS:
            try:
                low_precision_layers.try_product(word, low_precision_copies.FINISH_KEY, device)
            except InputError as error:
                found[word] = {"error": str(error)}
                continue
            with LowPrecision(networks, word, frozen=True, key=low_precision_copies.FINISH_KEY).computing():
                gone = _norm(a - b for a, b in zip(finish(), whole, strict=True))
                found[word] = {**iteration.timed(finish), "drift": gone / walked}
        return {"layers": found}
    finally:
        if compiled:
            iteration.forget()  # blocks stay compiled


def _norm(parts: Iterable[torch.Tensor]) -> float:
    return math.sqrt(sum(float(part.float().square().sum()) for part in parts))
