"""Reward statistics of each prompt, for baselines and the choice of prompts.

They are equal on all processes and stored in checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from flowgrpo.training.advantages.past_rewards import PastRewards


class PromptStats:
    """Statistics of total rewards, by index of the training prompt. A reward counts half after `half_life` iterations.

    SPO (arXiv 2509.13232) discounts by the divergence of the policy instead, which needs a reference model.
    """

    def __init__(self, half_life: float):
        self.half_life = half_life
        self.seen: dict[int, tuple[float, float, int, float]] = {}  # count, sum, iteration, squared deviations

    def counts(self, prompts: Iterable[int], iteration: int) -> tuple[Tensor, Tensor]:
        """Return the number (P,) and the sum (P,) of the rewards of prompts, float64, discounted up to `iteration`."""
        stats = [self._discounted(i, iteration)[:2] for i in prompts]
        count, total = torch.tensor(stats, dtype=torch.float64).reshape(-1, 2).unbind(1)
        return count, total

    def past(self, prompts: Iterable[int], iteration: int) -> PastRewards:
        """Return the rewards of prompts (P) so far, discounted up to `iteration`."""
        stats = [self._discounted(i, iteration) for i in prompts]
        count, total, square = torch.tensor(stats, dtype=torch.float64).reshape(-1, 3).unbind(1)
        return PastRewards(count, total / count, square)

    def variances(self, prompts: Iterable[int], iteration: int) -> Tensor:
        """Return the variance (P,) of each prompt's rewards so far, float64, discounted up to `iteration`.

        Two rewards of the mean variance of these prompts are added to each, so that few equal rewards do not count as no
        variance. All are 1 if none is known or positive.
        """
        past = self.past(prompts, iteration)
        mean = past.square.sum() / past.count.sum().clamp(min=1e-300)
        return (past.square + 2 * mean) / (past.count + 2) if mean > 0 else torch.ones_like(past.count)

    def add(self, prompts: Iterable[int], rewards: Tensor, iteration: int) -> None:
        """Add rewards (B,) of samples to their prompts (B); a lost reward (NaN) is skipped."""
        for prompt, reward in zip(prompts, rewards.tolist(), strict=True):
            if reward == reward:
                count, total, square = self._discounted(prompt, iteration)
                added = count / (count + 1) * (reward - total / count) ** 2 if count else 0.0
                self.seen[prompt] = (count + 1, total + reward, iteration, square + added)

    def _discounted(self, prompt: int, iteration: int) -> tuple[float, float, float]:
        count, total, last, square = self.seen.get(prompt, (0.0, 0.0, iteration, 0.0))
        kept = 0.5 ** ((iteration - last) / self.half_life)
        return count * kept, total * kept, square * kept

    def state(self) -> dict[str, list[float]]:
        """Return the state for a checkpoint, as JSON."""
        return {str(prompt): list(stats) for prompt, stats in self.seen.items()}

    def restore(self, state: Mapping[str, list[float]]) -> None:
        """Restore what `state` returned. The states of earlier versions lack squares, which count as 0."""
        self.seen = {
            int(prompt): (count, total, int(last), squares[0] if squares else 0.0)
            for prompt, (count, total, last, *squares) in state.items()
        }
