"""Metrics of rewards and of the policy, as in a metric line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from flowgrpo.training.advantages.reward_combination import Combination
from flowgrpo.training.reports.samples import Sample
from flowgrpo.training.weights.optimizer_step import UpdateStats
from rewards import Reward


def of_totals(total: torch.Tensor) -> dict[str, float | None]:
    """Return mean and standard deviation of total rewards (B,); lost ones (NaN) are skipped, None if all are lost."""
    finite = total[total.isfinite()]
    return {"reward/mean": mean(total), "reward/std": float(finite.std(correction=0)) if len(finite) else None}


def of_policy(stats: Sequence[UpdateStats], gather: Callable[[list[Any]], list[Any]]) -> dict[str, Any]:
    """Return the policy metrics of an iteration from its optimizer steps, gathered over processes."""
    by_process = gather([stats])
    every = [each for of_process in by_process for each in of_process]
    edges, ratios = max(1, sum(each.edges for each in every)), sum(each.ratios for each in every)
    losses = [each.loss for each in every if each.loss is not None]
    kls = [each.kl for each in every if each.kl is not None]
    first_steps = [of_process[0] for of_process in by_process]
    drifts = [each.max_abs_log_ratio for each in first_steps if each.max_abs_log_ratio is not None]

    def of_ratios(total: float) -> float | None:
        """Return `total` per edge with a ratio; 0 if no edge was trained, None if all ratios are 1 by definition."""
        return total / max(1, ratios) if ratios or not any(each.edges for each in every) else None

    return {
        "policy/loss": sum(losses) / edges if losses else None,
        "policy/max_abs_log_ratio": float(torch.tensor(drifts).max()) if drifts else None,
        "policy/mean_abs_log_ratio": of_ratios(sum(each.sum_abs_log_ratio for each in every)),
        "policy/clip_fraction": of_ratios(sum(each.clipped for each in every)),
        "policy/clip_fraction_high": of_ratios(sum(each.clipped_high for each in every)),
        "policy/clip_fraction_low": of_ratios(sum(each.clipped - each.clipped_high for each in every)),
        "policy/kl": sum(kls) / edges if kls else None,
        "policy/grad_norm": float(torch.tensor([each.grad_norm for each in stats]).max()),
        "policy/updates": sum(each.taken for each in stats),
        "policy/skipped_updates": sum(each.skipped for each in stats),
        **_by_step(every, diverges=bool(kls)),
    }


def _by_step(every: Sequence[UpdateStats], *, diverges: bool) -> dict[str, float]:
    metrics = {}
    for step in sorted({step for each in every for step in each.by_step}):
        sums = [each.by_step[step] for each in every if step in each.by_step]
        edges, ratio, kl = (sum(column) for column in zip(*sums, strict=True))
        metrics[f"policy/mean_abs_log_ratio/step_{step + 1}"] = ratio / edges
        if diverges:
            metrics[f"policy/kl/step_{step + 1}"] = kl / edges
    return metrics


def of_samples(
    samples: Sequence[Sample], combination: Combination, rewards: Sequence[Reward], eval_rewards: Sequence[Reward]
) -> dict[str, float | int | None]:
    """Return the metrics of held-out samples; `eval_rewards` are not part of the total reward."""
    totals = totals_of((sample.rewards for sample in samples), combination, [reward.name for reward in rewards])
    metrics: dict[str, float | int | None] = {**of_totals(totals), "reward/count": int(totals.isfinite().sum())}
    for name in (reward.name for reward in (*rewards, *eval_rewards)):
        metrics[f"reward/{name}/mean"] = mean(torch.tensor([_nan(sample.rewards[name]) for sample in samples]))
    return metrics


def totals_of(
    scores: Iterable[Mapping[str, float | None]], combination: Combination, names: Sequence[str]
) -> torch.Tensor:
    """Return the total (B,) of each sample's rewards `names`; NaN where no reward applies."""
    values = [[_nan(of_sample[name]) for name in names] for of_sample in scores]
    return combination.total(torch.tensor(values, dtype=torch.float64))


def mean(values: torch.Tensor) -> float | None:
    """Return the mean of the finite values; None if there are none."""
    finite = values[values.isfinite()]
    return float(finite.mean()) if len(finite) else None


def _nan(value: float | None) -> float:
    return float("nan") if value is None else value
