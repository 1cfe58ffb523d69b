"""What a run remembers of each prompt: a discounted count and sum of its rewards, and when it was last seen.

It serves a baseline that needs no group (SPO) and the choice of prompts (VADE and kin). Every process keeps the same, and
a checkpoint holds it. The reward is what a sample's rewards come to together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

Tensor = torch.Tensor


class PromptStats:
    """Rewards of prompts, by their index among the training prompts.

    Args:
        half_life: iterations after which what was seen counts half; the policy has moved on since. SPO (arXiv 2509.13232)
            forgets by the divergence of the policy since then, which is not known here without a reference.
    """

    def __init__(self, half_life: float):
        self.half_life = half_life
        self.seen: dict[int, tuple[float, float, int]] = {}  # count, sum, iteration

    def counts(self, prompts: Iterable[int], iteration: int) -> tuple[Tensor, Tensor]:
        """Discounted number (P,) and sum (P,) of the rewards of prompts, float64, as they count at an iteration."""
        stats = [self._discounted(i, iteration) for i in prompts]
        count, total = torch.tensor(stats, dtype=torch.float64).reshape(-1, 2).unbind(1)
        return count, total

    def expected(self, prompts: Iterable[int], iteration: int) -> Tensor:
        """Mean reward (P,) float64 of each prompt so far; NaN where it has not been seen."""
        count, total = self.counts(prompts, iteration)
        return total / count

    def add(self, prompts: Iterable[int], rewards: Tensor, iteration: int) -> None:
        """Remember rewards (B,) of samples, NaN for those that were lost, of the prompts they belong to."""
        for prompt, reward in zip(prompts, rewards.tolist(), strict=True):
            if reward == reward:
                count, total = self._discounted(prompt, iteration)
                self.seen[prompt] = (count + 1, total + reward, iteration)

    def _discounted(self, prompt: int, iteration: int) -> tuple[float, float]:
        count, total, last = self.seen.get(prompt, (0.0, 0.0, iteration))
        kept = 0.5 ** ((iteration - last) / self.half_life)
        return count * kept, total * kept

    def state(self) -> dict[str, list[float]]:
        """What a checkpoint keeps, as JSON."""
        return {str(prompt): list(seen) for prompt, seen in self.seen.items()}

    def restore(self, state: Mapping[str, list[float]]) -> None:
        """Undo what happened since `state` returned this."""
        self.seen = {int(prompt): (count, total, int(last)) for prompt, (count, total, last) in state.items()}
