"""Schedules: sigmas of a run, and choices of its stochastic and trained steps."""

from __future__ import annotations

import numpy as np
import torch


def shifted(sigmas: torch.Tensor, shift: float) -> torch.Tensor:
    """Return sigmas s after SD3's static time shift (arXiv 2403.03206, eq. 23): `shift s / (1 + (shift - 1) s)`."""
    return shift * sigmas / (1 + (shift - 1) * sigmas)


def linear_sigmas(num_steps: int, shift: float = 1.0) -> torch.Tensor:
    """Return `num_steps` + 1 float32 sigmas from 1 (noise) to 0 (data): evenly spaced, then shifted.

    The table of diffusers' `FlowMatchEulerDiscreteScheduler` with the same shift differs: its last sigma before 0 is
    0.001, shifted twice. A policy always uses its pipeline's own table.
    """
    return shifted(torch.linspace(1, 0, num_steps + 1, dtype=torch.float64), shift).float()


def euler_sigmas(num_steps: int, shift: float = 1.0, train_steps: int = 1000) -> torch.Tensor:
    """Return the table of diffusers' `FlowMatchEulerDiscreteScheduler` with a static shift, equal bit for bit.

    As there, the ends of the shifted training table in float32 are spaced evenly, then shifted once more.
    """
    ends = shifted(torch.tensor([train_steps, 1], dtype=torch.float32) / train_steps, shift).tolist()
    first, last = (end * train_steps for end in ends)
    times = np.linspace(first, last, num_steps)
    sigmas = shifted(torch.from_numpy(times / train_steps), shift)
    return torch.cat([sigmas.float(), torch.zeros(1)])


def random_window(size: int, first: int, end: int, rng: np.random.Generator) -> range:
    """Return `size` consecutive steps of `first` ... `end` - 1, every position equally likely (Flow-GRPO-Fast)."""
    start = int(rng.integers(first, end - size + 1))
    return range(start, start + size)


def sliding_window(size: int, first: int, end: int, iteration: int, every: int, stride: int) -> range:
    """Return a window of `size` steps, which begins at `first` and moves by `stride` steps every `every` iterations.

    MixGRPO's progressive strategy (arXiv 2507.21802, Algorithm 1). At `end` the window stays; MixGRPO's code can restart it.
    """
    start = min(first + iteration // every * stride, end - size)
    return range(start, start + size)


def spread(count: int, end: int) -> list[int]:
    """Return `count` steps spread evenly over 0 ... `end` - 1, both ends included; 0, 3, 6, 9 for 4 of 10 (ours)."""
    return [round(i * (max(end, count) - 1) / max(count - 1, 1)) for i in range(count)]


def random_steps(steps: range, count: int, rng: np.random.Generator) -> tuple[int, ...]:
    """Return `count` of `steps` without repeats, sorted, each choice equally likely."""
    return tuple(sorted(int(i) for i in rng.permutation(np.array(steps))[:count]))
