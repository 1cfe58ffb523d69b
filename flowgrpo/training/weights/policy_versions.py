"""Earlier versions of the policy, which make stale rollouts (`run.staleness`), with their prompt statistics.

With staleness n, iteration i is rolled out by the policy from before iteration i - n (or before the first iteration),
and its prompts are chosen by the statistics of that time. The old log-probabilities are those of this policy. So ratios
compare the trained policy with the policy that sampled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from flowgrpo.training.distributed.dtensors import shard_like
from flowgrpo.training.prompts.prompt_statistics import PromptStats
from flowgrpo.training.weights.old_policies import clones
from flowgrpo.training.weights.trained_weights import Weights

Stats = dict[str, list[float]]  # see `PromptStats.state`


@dataclass(frozen=True)
class Version:
    """The trained tensors, in the order of `Weights.parameters`, and the prompt statistics before an iteration."""

    weights: list[torch.Tensor]
    prompt_stats: Stats


class Versions:
    """The earlier versions of a policy that later rollouts need, `kept` by iteration; none without staleness."""

    def __init__(self, weights: Weights, staleness: int):
        self.weights, self.staleness = weights, staleness
        self.kept: dict[int, Version] = {}

    def keep(self, iteration: int, prompt_stats: Stats) -> None:
        """Copy the policy before `iteration`, and drop versions that no later rollout needs."""
        if self.staleness:
            self.kept = {i: version for i, version in self.kept.items() if i >= iteration - self.staleness}
            self.kept[iteration] = Version(clones(self.weights.parameters), prompt_stats)

    def of(self, iteration: int) -> Version | None:
        """Return the version that rolls out `iteration`; None if that is the current policy."""
        behind = max(0, iteration - self.staleness)
        return self.kept[behind] if behind < iteration else None

    @contextmanager
    def rolling_out(self, iteration: int) -> Iterator[None]:
        """Return a context with the weights that roll out `iteration`."""
        version = self.of(iteration)
        if version is None:
            yield
            return
        with self.weights.swap(version.weights):
            yield
            self.weights.lockstep.join()  # before swapping back: other processes may still gather these weights

    def stats_at(self, iteration: int, now: PromptStats) -> PromptStats:
        """Return the prompt statistics of the version that rolls out `iteration`; `now` are the current statistics."""
        version = self.of(iteration)
        if version is None:
            return now
        then = PromptStats(now.half_life)
        then.restore(version.prompt_stats)
        return then

    def tensors(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return the weights of all versions by iteration and name."""
        return {
            str(iteration): dict(zip(self.weights.named, version.weights, strict=True))
            for iteration, version in self.kept.items()
        }

    def load(self, tensors: Mapping[str, Mapping[str, torch.Tensor]], prompt_stats: Mapping[str, Stats]) -> None:
        """Restore the result of `tensors`, and the prompt statistics of each iteration.

        Raises KeyError if a tensor is missing.
        """
        likes = {name: p.detach() for name, p in self.weights.named.items()}
        self.kept = {
            int(iteration): Version(
                [shard_like(by_name[name], like).to(like.device).clone() for name, like in likes.items()],
                prompt_stats[iteration],
            )
            for iteration, by_name in tensors.items()
        }
