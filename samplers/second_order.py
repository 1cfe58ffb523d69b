"""ODE steps of second order in trees: DPM-Solver++ 2M (arXiv 2211.01095), one evaluation a step.

With clean estimates x0 = x - sigma v, and h the step of log((1 - sigma) / sigma), a step from sigma to sigma' is

    Euler's step + (sigma - sigma') / sigma x h / (2 h_before) x (x0 - x0_before)

where "before" is the step that led to this state. It is Euler's step alone if that step was not of second order (a root, or
below a split), began at sigma 1, where h_before is infinite, or if sigma' is 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from samplers.drawing import to_device
from samplers.kernels import State


class SecondOrder:
    """The second-order part of steps, from the clean estimates that earlier steps have left."""

    def __init__(self) -> None:
        self._before: dict[int, tuple[float, State]] = {}  # node -> sigma and clean estimate of its parent

    def correction(
        self,
        state: State,
        velocity: State,
        sigma: float,
        sigma_next: float,
        nodes: Sequence[int],
        children: Sequence[int],
    ) -> State:
        """Return what second order adds to Euler's steps, float32 tensors (E, ...), from `nodes` to their `children`.

        `state` and `velocity` have tensors (E, ...), `sigma_next` is above 0. Estimates are kept for the children's steps.
        """
        clean = tuple(x.float() - sigma * v.float() for x, v in zip(state, velocity, strict=True))
        before = [self._before.get(node) for node in nodes]
        weights = torch.tensor([0.0 if each is None else _weight(each[0], sigma, sigma_next) for each in before])
        added = []
        for component, own in enumerate(clean):
            past = torch.stack([x if each is None else each[1][component] for x, each in zip(own, before, strict=True)])
            added.append(to_device(weights, own.device).reshape(-1, *[1] * (own.ndim - 1)) * (own - past))
        for row, child in enumerate(children):
            self._before[child] = sigma, tuple(x[row] for x in clean)
        return tuple(added)

    def forget(self, nodes: Sequence[int]) -> None:
        """Drop what was kept for the steps from `nodes`."""
        for node in nodes:
            self._before.pop(node, None)


def _weight(before: float, sigma: float, sigma_next: float) -> float:
    if before == 1:
        return 0.0
    ratio = (_log_odds(sigma_next) - _log_odds(sigma)) / (_log_odds(sigma) - _log_odds(before))
    return (sigma - sigma_next) / sigma * ratio / 2


def _log_odds(sigma: float) -> float:
    return math.log((1 - sigma) / sigma)
