"""Rollouts that are some iterations behind (`run.staleness`): the policies that make them, and what they choose prompts by.

Iteration i is rolled out as the policy stood before iteration i - n, or before the first where there is none so early. Old
log-probabilities are those of that policy, so that ratios tell how far the trained one has gone since.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from flowgrpo.training.advantages.prompt_statistics import PromptStats
from flowgrpo.training.distributed.dtensors import placed_as
from flowgrpo.training.weights.trained_weights import Weights

Stats = dict[str, list[float]]  # see `PromptStats.state`


@dataclass(frozen=True)
class Version:
    """What stood before an iteration: the trained tensors, in the order of `Weights.parameters`, and the prompt stats."""

    weights: list[torch.Tensor]
    prompt_stats: Stats


class Versions:
    """The versions of a policy that later rollouts need: none where they are made by the policy as it stands.

    Args:
        weights: of the policy.
        staleness: by how many iterations rollouts are behind.

    Attributes:
        kept: by iteration.
    """

    def __init__(self, weights: Weights, staleness: int):
        self.weights, self.staleness = weights, staleness
        self.kept: dict[int, Version] = {}

    def keep(self, iteration: int, prompt_stats: Stats) -> None:
        """Remember what stands before an iteration, and forget what no rollout from there on needs."""
        if self.staleness:
            self.kept = {i: version for i, version in self.kept.items() if i >= iteration - self.staleness}
            self.kept[iteration] = Version([p.detach().clone() for p in self.weights.parameters], prompt_stats)

    def of(self, iteration: int) -> Version | None:
        """What an iteration is rolled out by; None for what stands, as before the first, when noise is calibrated."""
        behind = max(0, iteration - self.staleness)
        return self.kept[behind] if behind < iteration else None

    @contextmanager
    def rolling_out(self, iteration: int) -> Iterator[None]:
        """Compute by the weights that an iteration is rolled out by, inside this context."""
        version = self.of(iteration)
        if version is None:
            yield
            return
        with self.weights.swapped(version.weights):
            yield
            self.weights.lockstep.join()  # the others may still gather these weights from here

    def known(self, iteration: int, now: PromptStats) -> PromptStats:
        """What was known of the prompts when the weights stood that an iteration is rolled out by.

        Args:
            now: what is known.
        """
        version = self.of(iteration)
        if version is None:
            return now
        then = PromptStats(now.half_life)
        then.restore(version.prompt_stats)
        return then

    def tensors(self) -> dict[str, dict[str, torch.Tensor]]:
        """The weights that are kept, by iteration and name."""
        return {
            str(iteration): dict(zip(self.weights.named, version.weights, strict=True))
            for iteration, version in self.kept.items()
        }

    def load(self, tensors: Mapping[str, Mapping[str, torch.Tensor]], prompt_stats: Mapping[str, Stats]) -> None:
        """Take over what `tensors` returned, and the prompt stats of each iteration.

        Raises:
            KeyError: a tensor is missing.
        """
        likes = {name: p.detach() for name, p in self.weights.named.items()}
        self.kept = {
            int(iteration): Version(
                [placed_as(own[name], like).to(like.device).clone() for name, like in likes.items()],
                prompt_stats[iteration],
            )
            for iteration, own in tensors.items()
        }
