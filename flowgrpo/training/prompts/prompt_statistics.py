"""Reward statistics of each prompt, for the baseline `tracker` (SPO) and the choice of prompts (VADE).

They are equal on all processes and stored in checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor


class PromptStats:
    """Statistics of total rewards, by index of the training prompt. A reward counts half after `half_life` iterations.

    SPO (arXiv 2509.13232) discounts by the divergence of the policy instead, which needs a reference model.
    """

    def __init__(self, half_life: float):
        self.half_life = half_life
        self.seen: dict[int, tuple[float, float, int]] = {}  # count, sum, iteration

    def counts(self, prompts: Iterable[int], iteration: int) -> tuple[Tensor, Tensor]:
        """Return the number (P,) and the sum (P,) of the rewards of prompts, float64, discounted up to `iteration`."""
        stats = [self._discounted(i, iteration) for i in prompts]
        count, total = torch.tensor(stats, dtype=torch.float64).reshape(-1, 2).unbind(1)
        return count, total

    def mean_rewards(self, prompts: Iterable[int], iteration: int) -> Tensor:
        """Return the discounted mean reward (P,) of each prompt so far, float64; NaN for unseen prompts."""
        count, total = self.counts(prompts, iteration)
        return total / count

    def add(self, prompts: Iterable[int], rewards: Tensor, iteration: int) -> None:
        """Add rewards (B,) of samples to their prompts (B); a lost reward (NaN) is skipped."""
        for prompt, reward in zip(prompts, rewards.tolist(), strict=True):
            if reward == reward:
                count, total = self._discounted(prompt, iteration)
                self.seen[prompt] = (count + 1, total + reward, iteration)

    def _discounted(self, prompt: int, iteration: int) -> tuple[float, float]:
        count, total, last = self.seen.get(prompt, (0.0, 0.0, iteration))
        kept = 0.5 ** ((iteration - last) / self.half_life)
        return count * kept, total * kept

    def state(self) -> dict[str, list[float]]:
        """Return the state for a checkpoint, as JSON."""
        return {str(prompt): list(stats) for prompt, stats in self.seen.items()}

    def restore(self, state: Mapping[str, list[float]]) -> None:
        """Restore what `state` returned."""
        self.seen = {int(prompt): (count, total, int(last)) for prompt, (count, total, last) in state.items()}
