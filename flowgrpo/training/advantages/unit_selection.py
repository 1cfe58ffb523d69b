"""Choice of prompts, group sizes and the units that are trained on, as pure functions.

`p` is a prompt's mean reward, mapped to [0, 1]; for a binary reward it is the success rate.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from flowgrpo.schema.sections import Select
from flowgrpo.training.advantages.baseline import Baseline, weighted_sum
from flowgrpo.training.advantages.credit_units import CreditUnits
from flowgrpo.training.advantages.past_rewards import PastRewards


def most_uncertain(count: Tensor, total: Tensor, number: int, generator: np.random.Generator) -> list[int]:
    """Return indices of the `number` prompts with the most uncertain reward, by Thompson sampling (VADE).

    Each prompt's success rate p is drawn from Beta(1 + `total`, 1 + `count` - `total`), with discounted counts and sums
    of rewards (P,). The prompts with the largest p (1 - p), the variance of a binary reward, are chosen. An unseen prompt
    is chosen about as often as one that is known to be half solved.
    """
    p = generator.beta(1 + total.numpy(), 1 + (count - total).numpy())
    return np.argsort(-p * (1 - p), kind="stable")[:number].tolist()


def robust_weights(difficulty: Tensor, rate: float) -> Tensor:
    """Return loss weights (G,) of groups: softmax(rate x difficulty) x G. Their mean is 1, and hard groups weigh more.

    Prompt-GDRO (arXiv 2601.19280) updates weights of difficulty bins multiplicatively. Here each prompt is its own bin
    and the difficulty, 1 minus its mean reward, is already a discounted average over iterations.
    """
    return torch.softmax(rate * difficulty, 0) * len(difficulty)


def knapsack(p: Tensor, budget: int, least: int, most: int) -> list[int]:
    """Return the number of samples of each prompt; `budget` is their sum (Knapsack RL, arXiv 2509.25849).

    Each number is from `least` to `most`. With success rates `p` (P,), the value of n samples of a prompt is
    (1 - p^n - (1 - p)^n) p (1 - p)^2: the chance that their rewards differ, times the paper's information gain.
    """

    def gain(i: int, n: int) -> float:
        q = float(p[i])
        return (q**n * (1 - q) + (1 - q) ** n * q) * q * (1 - q) ** 2

    return _spend(gain, [least] * len(p), budget, most)


def root_variance(variance: Tensor, budget: int, least: int, most: int) -> list[int]:
    """Return the number n of samples of each prompt that makes the sum of variance / n least; `budget` is their sum.

    Each number is from `least` to `most`. Where these bounds and whole numbers allow, n is proportional to the square root
    of `variance` (P,), as Rollout-GDRO (arXiv 2601.19280) has it. That follows from minimising the variance of a mean
    over prompts of equal weight; the paper reaches it by a shadow price.
    """
    return _spend(lambda i, n: float(variance[i]) / (n * (n + 1)), [least] * len(variance), budget, most)


def _spend(gain: Callable[[int, int], float], sizes: list[int], budget: int, most: int) -> list[int]:
    """Raise `sizes`, to `most` each, until their sum is `budget`, always that with the largest gain of one more.

    `gain(i, n)` is what prompt i gains by one sample more than n. It falls in n, so the greedy choice is optimal.
    """
    heap = [(-gain(i, n), n, i) for i, n in enumerate(sizes) if n < most]  # of equal gains the smallest size is first
    heapq.heapify(heap)
    for _ in range(budget - sum(sizes)):
        _, _, i = heapq.heappop(heap)
        sizes[i] += 1
        if sizes[i] < most:
            heapq.heappush(heap, (-gain(i, sizes[i]), sizes[i], i))
    return sizes


def extremes(values: Tensor, number: int) -> Tensor:
    """Return indices (number,) of the best half and the worst half of values (B,), as Sol-RL (arXiv 2604.06916).

    If `number` is odd, the best half has one more.
    """
    order = values.argsort(descending=True, stable=True)
    best = (number + 1) // 2
    return torch.cat([order[:best], order[len(order) - (number - best) :]])


def max_variance(values: Tensor, number: int) -> Tensor:
    """Return indices (number,) of the subset of values (B,) with the largest variance.

    It consists of the k largest and the `number` - k smallest (PODS, arXiv 2504.13818), so every k is tried.
    """
    order = values.argsort(descending=True, stable=True)
    choices = [torch.cat([order[:k], order[len(order) - (number - k) :]]) for k in range(number + 1)]
    return max(choices, key=lambda chosen: float(values[chosen].var(correction=0)))


def normalize_advantages(
    units: CreditUnits,
    weights: Tensor,
    *,
    past: PastRewards | None,
    baseline: Baseline,
    select: Select | None,
    done: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Return the advantages (U,) of units, and a mask (U,) of the units that are trained on.

    `past` are the rewards of earlier iterations; None if there are none. `done` is the fraction of the iterations before
    this one, see `Train.done_at`.
    """
    total = weighted_sum(units.values, weights)
    across = select is not None and select.across == "batch"
    trained = select_units(total, units.comparison, None if across else select, done)
    only_trained = select is not None and select.compares_kept
    values = units.values.where(trained[:, None], torch.nan) if only_trained else units.values
    advantages = baseline.advantages(
        values, weights, units.comparison, anchor=units.anchor, past=past, nested=units.nested, survival=units.survival
    )
    if across:
        known = advantages.where(total.isfinite(), torch.nan)
        trained = select_units(known, torch.zeros_like(units.comparison[:, :1]), select, done)
    if units.survival is not None:
        trained = trained & (units.survival.weight > 0)
    if only_trained:
        total = total.where(trained, torch.nan)
    return advantages, trained & ~baseline.drop_mask(advantages, total, units.comparison)


def select_units(values: Tensor, comparison: Tensor, select: Select | None, done: float = 0.0) -> Tensor:
    """Return a mask (U,) of the units that `select` chooses from each set to train on; it skips lost units (NaN).

    `values` (U,) are rewards. Across the batch, they are advantages, and all units are one set (D3S, arXiv 2509.22115,
    reconstructed from summaries).
    """
    if select is None:
        return torch.ones(len(values), dtype=torch.bool)
    rule = {"extremes": extremes, "max_variance": max_variance}[select.rule]
    _, index = comparison.unique(dim=0, return_inverse=True)
    chosen = torch.zeros(len(values), dtype=torch.bool)
    for i in range(int(index.max()) + 1):
        members = ((index == i) & values.isfinite()).nonzero()[:, 0]
        size = int((index == i).sum())
        number = min(len(members), max(2, round(select.share(done) * size)))
        chosen[members[rule(values[members], number)]] = True
    return chosen
