"""One optimizer step over all processes, with its sum of gradients, their clipping, and statistics."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from flowgrpo.training.distributed.dtensors import gather_whole, local
from flowgrpo.training.run.phases import phase
from flowgrpo.training.weights.optimizers import MESSAGE
from flowgrpo.training.weights.trained_weights import Weights


@dataclass(kw_only=True)
class UpdateStats:
    """Statistics of one optimizer step, over the edges of this process."""

    edges: int = 0  # number of edges
    ratios: int = 0  # edges whose ratio compares the trained policy with another policy
    loss: float | None = None  # sum of the objective's loss without divergences; None if its value has no meaning
    # Largest |log ratio|; None if not measured. Before the first update of an iteration it should be 0. With kept
    # graphs of the rollout it is measured on the first call only, which is repeated for it.
    max_abs_log_ratio: float | None = None
    sum_abs_log_ratio: float = 0.0
    clipped: int = 0  # edges that the clip stopped
    clipped_high: int = 0  # clipped edges whose ratio was too large
    kl: float | None = None  # sum of the divergence from the reference
    grad_norm: float = 0.0  # norm of the whole gradient before clipping
    taken: int = 0  # 1 if the step was taken; 0 if all loss weights are 0 or the gradient is not finite
    skipped: int = 0  # 1 if the gradient was not finite
    # By step of the schedule: number of edges, sum of |log ratio|, and sum of the divergence.
    by_step: dict[int, tuple[int, float, float]] = field(default_factory=dict)

    @torch.no_grad()
    def measure(
        self,
        log_ratio: torch.Tensor,
        clipped: torch.Tensor,
        above: torch.Tensor,
        *,
        divergence: torch.Tensor | None = None,
        loss: torch.Tensor | None = None,
        step: int | None = None,
        exact: bool = True,
        anchored: bool = True,
    ) -> None:
        """Add the statistics of E edges.

        Args:
            clipped: (E,) bool, whether the clip stops each edge.
            above: (E,) bool, whether the ratio that the clip tests is above 1.
            divergence: (E,) divergence from the reference, or None.
            loss: (E,) loss of each edge, or None if its value has no meaning.
            step: the edges' step of the schedule, counted from 0, or None.
            exact: whether the ratio must be 1 before the first update. Only then the largest |log ratio| is recorded.
            anchored: whether the ratio compares with another policy. Otherwise it is always 1 and is not counted.
        """
        gap = log_ratio.abs()
        sums = [gap.max(), gap.sum(), clipped.sum(), (clipped & above).sum()]
        sums += [] if divergence is None else [divergence.sum()]
        sums += [] if loss is None else [loss.sum()]
        # One transfer from the GPU.
        largest, total, clips, high, *optional = torch.stack([x.double() for x in sums]).tolist()
        if loss is not None:
            self.loss = (self.loss or 0.0) + optional.pop()
        self.edges += len(gap)
        self.ratios += len(gap) * anchored
        if exact:
            before = -1.0 if self.max_abs_log_ratio is None else self.max_abs_log_ratio
            self.max_abs_log_ratio = float(np.maximum(before, largest))  # keeps NaN, unlike max()
        self.sum_abs_log_ratio += total
        self.clipped += int(clips)
        self.clipped_high += int(high)
        if optional:
            self.kl = (self.kl or 0.0) + optional[0]
        if step is not None:
            edges, of_ratio, of_divergence = self.by_step.get(step, (0, 0.0, 0.0))
            self.by_step[step] = edges + len(gap), of_ratio + total, of_divergence + sum(optional)


def optimizer_step(
    weights: Weights,
    stats: UpdateStats,
    *,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    max_grad_norm: float,
    reduce: Callable[[torch.Tensor], torch.Tensor] | None,
) -> None:
    """Sum the gradients over all processes, clip their norm, and take the step if the norm is finite.

    `stats` gets the norm, and whether the step was taken. `reduce` sums a tensor over processes; None for one process.
    """
    with _never_retried(), phase("update"):
        # Sharded gradients were summed in the backward pass. Sum the others, which also waits for all backward passes.
        if reduce is not None:
            _sum_gradients([p for p in weights.parameters if not isinstance(p, DTensor)], reduce)
        # Initialise the scale on a process that has not scaled any loss yet.
        scaler.scale(local(weights.parameters[0]).new_zeros(0))
        scaler.unscale_(optimizer)
        stats.grad_norm = _clip(weights.parameters, max_grad_norm)
        if math.isfinite(stats.grad_norm):
            optimizer.step()
            weights.after_update()
            stats.taken = 1
        else:
            stats.skipped = 1
        scaler.update()


@contextmanager
def _never_retried() -> Iterator[None]:
    """Mark errors inside this context as not to be retried, since an optimizer step may be half taken."""
    try:
        yield
    except BaseException as error:
        error.half_a_step_taken = True  # type: ignore[attr-defined]  # `oom_retry` reads it
        raise


def _clip(parameters: Sequence[torch.nn.Parameter], max_norm: float) -> float:
    """Clip the gradients in place to a total norm; return the total norm before clipping."""
    reached = [p for p in parameters if p.grad is not None]
    kinds = [[p for p in reached if isinstance(p, DTensor) == sharded] for sharded in (True, False)]
    kinds = [own for own in kinds if own]
    if not kinds:
        return 0.0
    norms = [gather_whole(torch.nn.utils.get_total_norm([p.grad for p in own if p.grad is not None])) for own in kinds]
    norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    for own in kinds:
        torch.nn.utils.clip_grads_with_norm_(own, max_norm, norm)
    return float(norm)


def _sum_gradients(parameters: Sequence[torch.nn.Parameter], reduce: Callable[[torch.Tensor], torch.Tensor]) -> None:
    reached = reduce(torch.tensor([float(p.grad is not None) for p in parameters]))
    for p, by in zip(parameters, reached.tolist(), strict=True):
        if by and p.grad is None:  # only other processes used this expert, or had rows to train on
            p.grad = torch.zeros_like(p)
    for grads in messages([p.grad for p in parameters if p.grad is not None]):
        sums = reduce(torch.cat([grad.flatten() for grad in grads])).split([grad.numel() for grad in grads])
        torch._foreach_copy_(grads, [total.view_as(grad) for grad, total in zip(grads, sums, strict=True)])


def messages(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Group tensors into lists of at most `MESSAGE` bytes, each for one all-reduce. Large tensors are split.

    A large tensor that is not contiguous cannot be split and may exceed this size.
    """
    groups: list[list[torch.Tensor]] = []
    room = 0
    for tensor in tensors:
        splits = tensor.nbytes > MESSAGE and tensor.is_contiguous()
        for part in tensor.view(-1).split(MESSAGE // tensor.itemsize) if splits else [tensor]:
            room -= part.nbytes
            if room < 0 or not groups:
                groups.append([])
                room = MESSAGE - part.nbytes
            groups[-1].append(part)
    return groups
