"""One optimizer step: sum the gradients over the processes, clip their norm and step; and its statistics."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from flowgrpo.training.distributed.dtensors import gathered, local
from flowgrpo.training.run.phases import phase
from flowgrpo.training.weights.optimizers import MESSAGE
from flowgrpo.training.weights.trained_weights import Weights


@dataclass(kw_only=True)
class UpdateStats:
    """Sums over the edges of one optimizer step, on this process.

    Attributes:
        edges: how many were trained.
        ratios: how many of them have a ratio to another policy than the trained one itself.
        loss: sum of the objective's loss, without divergences; None where its value says nothing.
        max_abs_log_ratio: largest |log ratio|, None if it was not measured; before the first update of an iteration it must
            be 0. Where the graphs of a rollout are kept, that of the first call alone, which is made again for it.
        sum_abs_log_ratio: sum of |log ratio|.
        clipped: how many the clip stopped.
        clipped_high: of these, how many because the ratio was too large.
        kl: sum of the divergence from the reference, None if none is computed.
        grad_norm: of the whole gradient, before it is cut.
        taken: 1 if the step was taken, 0 where all weights are 0 or the gradient is not finite.
        skipped: 1 if the gradient was not finite, so that no step was taken.
        by_step: edges, and sums of |log ratio| and of the divergence, by the step of the schedule, where edges are of one.
    """

    edges: int = 0
    ratios: int = 0
    loss: float | None = None
    max_abs_log_ratio: float | None = None
    sum_abs_log_ratio: float = 0.0
    clipped: int = 0
    clipped_high: int = 0
    kl: float | None = None
    grad_norm: float = 0.0
    taken: int = 0
    skipped: int = 0
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
        """Count edges in.

        Args:
            log_ratio: (E,) of each.
            clipped: (E,) bool, which the objective stops.
            above: (E,) bool, whether the ratio that it looks at is above 1.
            divergence: (E,) from the reference; None if none is computed.
            loss: (E,) of each, where its value says something.
            step: of the schedule, counted from 0, that they are of; None where there is no such step.
            exact: whether the ratio is to be 1 before the first update of an iteration; only then the largest is kept.
            anchored: whether the ratio is to another policy; else it is 1 whatever is trained, and does not count.
        """
        gap = log_ratio.abs()
        asked = [gap.max(), gap.sum(), clipped.sum(), (clipped & above).sum()]
        asked += [] if divergence is None else [divergence.sum()]
        asked += [] if loss is None else [loss.sum()]
        largest, total, clips, high, *apart = torch.stack([x.double() for x in asked]).tolist()  # a GPU is asked once
        if loss is not None:
            self.loss = (self.loss or 0.0) + apart.pop()
        self.edges += len(gap)
        self.ratios += len(gap) * anchored
        if exact:
            before = -1.0 if self.max_abs_log_ratio is None else self.max_abs_log_ratio
            self.max_abs_log_ratio = float(np.maximum(before, largest))  # unlike Python's max, this keeps NaN
        self.sum_abs_log_ratio += total
        self.clipped += int(clips)
        self.clipped_high += int(high)
        if apart:
            self.kl = (self.kl or 0.0) + apart[0]
        if step is not None:
            edges, of_ratio, of_divergence = self.by_step.get(step, (0, 0.0, 0.0))
            self.by_step[step] = edges + len(gap), of_ratio + total, of_divergence + sum(apart)


def optimizer_step(
    weights: Weights,
    stats: UpdateStats,
    *,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    max_grad_norm: float,
    reduce: Callable[[torch.Tensor], torch.Tensor] | None,
) -> None:
    """Sum the gradients of all processes, clip them to a norm and take the step, unless one is not finite.

    Args:
        stats: gets the norm, and whether the step was skipped.
        scaler: of the loss, for float16; a disabled one does nothing.
        reduce: sum of a tensor over the processes; None where there is one.
    """
    with _never_retried(), phase("update"):
        # Gradients of weights in shards are summed as they come; asking for these also waits for all backward passes.
        if reduce is not None:
            _sum_gradients([p for p in weights.parameters if not isinstance(p, DTensor)], reduce)
        # A process without a loss in the run's first step has not set its scale up yet.
        scaler.scale(local(weights.parameters[0]).new_zeros(0))
        scaler.unscale_(optimizer)
        stats.grad_norm = _clipped(weights.parameters, max_grad_norm)
        if math.isfinite(stats.grad_norm):
            optimizer.step()
            weights.after_update()
            stats.taken = 1
        else:
            stats.skipped = 1
        scaler.update()


@contextmanager
def _never_retried() -> Iterator[None]:
    """Mark errors of this context: half an optimizer step may be taken."""
    try:
        yield
    except BaseException as error:
        error.half_a_step_taken = True  # type: ignore[attr-defined]  # read where work is retried
        raise


def _clipped(parameters: Sequence[torch.nn.Parameter], max_norm: float) -> float:
    """Cut the gradients to a norm, in place; returns the norm that they had, of all shards and whole tensors."""
    kinds = [[p for p in parameters if isinstance(p, DTensor) == cut and p.grad is not None] for cut in (True, False)]
    kinds = [own for own in kinds if own]
    if not kinds:
        return 0.0
    norms = [gathered(torch.nn.utils.get_total_norm([p.grad for p in own if p.grad is not None])) for own in kinds]
    norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    for own in kinds:
        torch.nn.utils.clip_grads_with_norm_(own, max_norm, norm)
    return float(norm)


def _sum_gradients(parameters: Sequence[torch.nn.Parameter], reduce: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Sum the gradients over the processes, in place; what is made for it is freed before the step."""
    reached = reduce(torch.tensor([float(p.grad is not None) for p in parameters]))
    for p, by in zip(parameters, reached.tolist(), strict=True):
        if by and p.grad is None:  # experts, say, that another process's rows chose, or no row here is trained on
            p.grad = torch.zeros_like(p)
    for grads in messages([p.grad for p in parameters if p.grad is not None]):
        everyone = reduce(torch.cat([grad.flatten() for grad in grads]))
        torch._foreach_copy_(
            grads, [own.view_as(g) for g, own in zip(grads, everyone.split([g.numel() for g in grads]), strict=True)]
        )


def messages(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Tensors, and parts of large ones, by the message in which processes send them.

    A message has at most `MESSAGE` bytes, unless it is one larger tensor whose numbers do not lie one after the other.
    """
    found: list[list[torch.Tensor]] = []
    room = 0
    for part in (part for tensor in tensors for part in _parts(tensor)):
        room -= part.nbytes
        if room < 0 or not found:
            found.append([])
            room = MESSAGE - part.nbytes
        found[-1].append(part)
    return found


def _parts(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """A tensor by itself, or where it is larger than a message, its numbers in as many parts as are needed."""
    if tensor.nbytes <= MESSAGE or not tensor.is_contiguous():  # whose numbers do not lie one after the other
        return [tensor]
    return tensor.view(-1).split(MESSAGE // tensor.itemsize)
