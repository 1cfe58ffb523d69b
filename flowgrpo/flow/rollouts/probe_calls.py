"""Probe calls of a flow model, timed to find batch sizes: a step, a decoding, and a step with its gradient.

Evaluations and drafts use the rollout's batch size. If they have other call arguments (such as guidance in a run that
trains without), a step and a decoding with these arguments must fit into memory, too; their time does not count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from types import MappingProxyType
from typing import Any

import torch

from flowgrpo.data.prompts import Prompt, Row
from flowgrpo.flow.pipeline.policy import Policy
from flowgrpo.flow.rollouts.prompt_encoding import build_rows, changed_arguments, longest_and_shortest
from flowgrpo.training.fitting.batch_probing import Timed
from flowgrpo.training.fitting.batch_sizes import ProbeCalls
from flowgrpo.training.weights.trained_weights import Weights
from samplers.kernels import State


def probe_calls(
    policy: Policy,
    weights: Weights,
    prompts: Sequence[Prompt],
    *,
    held_out: Sequence[Prompt] = (),
    call: Mapping[str, Any] = MappingProxyType({}),
    draft: Mapping[str, Any] = MappingProxyType({}),
) -> ProbeCalls:
    """Return the probe calls, on the longest of `prompts`.

    Evaluations sample the `held_out` prompts. `call` and `draft` are the call arguments that evaluations and drafts change.
    """
    (row,) = build_rows(longest_and_shortest(prompts)[:1])
    steps, sigma = len(policy.sigmas) - 1, policy.sigmas[0]

    @cache
    def start_rows(count: int) -> tuple[State, list[Row]]:
        rows = [replace(row, seed=seed) for seed in range(count)]
        return policy.start(rows), rows

    @torch.no_grad()
    def step(count: int) -> None:
        state, rows = start_rows(count)
        policy.velocity(state, sigma, rows)

    @torch.no_grad()
    def decode(count: int) -> None:
        policy.decode(*start_rows(count))

    def learn(count: int) -> None:
        state, rows = start_rows(count)
        squares = [v.float().square().mean() for v in policy.velocity(state, sigma, rows)]
        weights.lockstep.backward(sum(squares[1:], squares[0]))

    def sample_with(call: Mapping[str, Any], prompts: Sequence[Prompt]) -> Callable[[int], None]:
        @torch.no_grad()
        def sample(count: int) -> None:
            (row,) = build_rows(longest_and_shortest(prompts)[:1])
            rows = [replace(row, seed=seed) for seed in range(count)]
            with policy.call_overrides(**call):
                state = policy.start(rows)
                policy.velocity(state, policy.sigmas[0], rows)
                policy.decode(state, rows)

        return sample

    others = [
        Timed(0, sample_with(arguments, some_prompts))
        for arguments, some_prompts in ((call, held_out), (draft, prompts))
        if some_prompts and changed_arguments(arguments, policy)
    ]
    return ProbeCalls(rollout=[Timed(steps, step), Timed(1, decode), *others], update=[Timed(steps, learn)])
