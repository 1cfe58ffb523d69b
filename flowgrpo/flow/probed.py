"""The calls of a flow model that sizes of batches are tried with: a step, a decoding, and a step with its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import torch

from flowgrpo.data.prompts import Prompt, Row
from flowgrpo.flow.encoding import longest_and_shortest, rows_of
from flowgrpo.flow.pipeline.policy import Policy
from flowgrpo.training.batch_sizes import ProbeCalls
from flowgrpo.training.probing import Timed
from flowgrpo.training.weights import Weights
from samplers.kernels import State


def probe_calls(policy: Policy, weights: Weights, prompts: Sequence[Prompt]) -> ProbeCalls:
    """The calls, on the longest of some prompts; a sample takes part in one of each step, and in one decoding.

    Args:
        policy: whose sigmas are known.
        weights: whose gradient an update takes.
    """
    (row,) = rows_of(longest_and_shortest(prompts)[:1])
    steps, sigma = len(policy.sigmas) - 1, policy.sigmas[0]

    @cache
    def begun(count: int) -> tuple[State, list[Row]]:
        rows = [replace(row, seed=seed) for seed in range(count)]
        return policy.start(rows), rows

    @torch.no_grad()
    def step(count: int) -> None:
        state, rows = begun(count)
        policy.velocity(state, sigma, rows)

    @torch.no_grad()
    def decode(count: int) -> None:
        policy.decode(*begun(count))

    def learn(count: int) -> None:
        state, rows = begun(count)
        weights.lockstep.backward(sum(v.float().square().mean() for v in policy.velocity(state, sigma, rows)))

    return ProbeCalls(rollout=[Timed(steps, step), Timed(1, decode)], update=[Timed(steps, learn)])
