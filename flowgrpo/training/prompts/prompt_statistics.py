"""Reward statistics of each prompt, for baselines and the choice of prompts.

They are equal on all processes and stored in checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from flowgrpo.schema.schedule import HalfLife
from flowgrpo.training.advantages.past_rewards import PastRewards


class PromptStats:
    """Statistics of total rewards, by index of the training prompt. Earlier rewards count less, see `train.half_life`.

    SPO's code (arXiv 2509.13232) measures how far the policy moved since a prompt's last visit on its stored sample. Here
    (`by: log_ratio`) an odometer sums the mean size of the log ratios in each iteration's update, over all its samples.
    """

    def __init__(self, half_life: HalfLife):
        self.half_life = half_life
        self.odometer = 0.0  # how far the policy moved so far, the sum of `move`
        self.seen: dict[int, tuple[float, float, float, float]] = {}  # count, sum, age of the run, squared deviations

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
        """Add the rewards (B,) of an iteration's samples to their prompts (B); a lost reward (NaN) is skipped."""
        visited: dict[int, tuple[float, float, float]] = {}
        for prompt, reward in zip(prompts, rewards.tolist(), strict=True):
            if reward == reward:
                count, total, square = visited.get(prompt) or self._discounted(prompt, iteration)
                added = count / (count + 1) * (reward - total / count) ** 2 if count else 0.0
                visited[prompt] = count + 1, total + reward, square + added
        for prompt, (count, total, square) in visited.items():
            self.seen[prompt] = count, total, self._age(iteration), square

    def move(self, distance: float | None) -> None:
        """Add how far the policy moved in an iteration (`policy/mean_abs_log_ratio`); skip it if it is not finite."""
        if distance is not None and math.isfinite(distance):
            self.odometer += distance

    def _age(self, iteration: int) -> float:
        return self.odometer if self.half_life.by == "log_ratio" else iteration

    def _discounted(self, prompt: int, iteration: int) -> tuple[float, float, float]:
        if prompt not in self.seen:
            return 0.0, 0.0, 0.0
        count, total, last, square = self.seen[prompt]
        kept = self.half_life.kept(self._age(iteration) - last)
        return count * kept, total * kept, square * kept

    def state(self) -> dict[str, list[float]]:
        """Return the state for a checkpoint, as JSON."""
        odometer = {"odometer": [self.odometer]} if self.half_life.by == "log_ratio" else {}
        return {**odometer, **{str(prompt): list(stats) for prompt, stats in self.seen.items()}}

    def restore(self, state: Mapping[str, list[float]]) -> None:
        """Restore what `state` returned. The states of earlier versions lack the odometer and squares, which count as 0."""
        prompts = dict(state)
        [self.odometer] = prompts.pop("odometer", [0.0])
        self.seen = {
            int(prompt): (count, total, last, squares[0] if squares else 0.0)
            for prompt, (count, total, last, *squares) in prompts.items()
        }
