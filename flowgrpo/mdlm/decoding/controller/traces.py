"""What a decode looked like from within, step by step: the examples that a learned commitment is trained on.

TraceLock (arXiv 2605.24697 and its code). A frozen predictor proposes its likeliest token for every masked position at every
step; a proposal is worth committing if it is the token of the finished answer. No decode has to be watched for that: its
step map tells every canvas, and one more evaluation of each gives the proposals.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from flowgrpo.mdlm.decoding.decode import Rollout
from flowgrpo.mdlm.decoding.network.predictor import MaskPredictor
from samplers.noise import generator

Tensor = torch.Tensor

PROMPT, LOCKED, OPEN, END = range(4)  # states of a position: END is masked and proposes the end


@dataclass(frozen=True, kw_only=True)
class Scene:
    """What a controller sees of B canvases of T columns.

    Attributes:
        hidden: last hidden states (B, T, H) of the predictor, from the earlier to the later layer.
        confidence: (B, T) probability of the proposal; 1 where there is a token.
        state: (B, T) PROMPT, LOCKED, OPEN or END.
        position: (B, T) place in the completion, 0 in the prompt.
        visible: (B, T) bool, False at padding and after the window.
    """

    hidden: tuple[Tensor, ...]
    confidence: Tensor
    state: Tensor
    position: Tensor
    visible: Tensor


@dataclass(frozen=True)
class Trace:
    """One step of several decodes.

    Attributes:
        scene: with the whole canvas visible but padding.
        label: (B, T) bool, whether the proposal is the token of the finished answer.
    """

    scene: Scene
    label: Tensor


class Traces(Protocol):
    """Traces as a controller takes them, one by one: a list of them, or what makes them when they are asked for."""

    def __len__(self) -> int: ...

    def __getitem__(self, i: int, /) -> Trace: ...

    def __iter__(self) -> Iterator[Trace]: ...


@torch.no_grad()
def traces(predictor: MaskPredictor, rollout: Rollout, layers: int, end_ids: Sequence[int] = ()) -> list[Trace]:
    """A trace for each step of the decodes, of the rows that took it. One evaluation for each row and step.

    Args:
        layers: hidden states to keep.
        end_ids: tokens that end or fill up an answer.
    """
    found = []
    for s in range(int(rollout.steps.max())):
        row = (rollout.steps > s).nonzero()[:, 0]
        found.append(trace(predictor, rollout, row=row, step=torch.full_like(row, s), layers=layers, end_ids=end_ids))
    return found


@torch.no_grad()
def trace(
    predictor: MaskPredictor, rollout: Rollout, *, row: Tensor, step: Tensor, layers: int, end_ids: Sequence[int] = ()
) -> Trace:
    """What some rows (R,) of the decodes looked like before steps (R,) of theirs. One evaluation for each."""
    ids, mask = rollout.ids[row], rollout.attention_mask[row]
    ids[:, rollout.prompt :][rollout.step_map[row] >= step[:, None]] = predictor.mask_id
    logits, hidden = predictor.logits_and_hidden(ids, mask, start=0, stop=None, layers=layers)
    confidence, proposal = logits.softmax(-1).max(-1)
    masked = ids == predictor.mask_id
    made = scene(
        ids,
        mask,
        rollout.prompt,
        masked=masked,
        proposal=proposal,
        confidence=confidence,
        hidden=hidden,
        end_ids=end_ids,
    )
    return Trace(made, masked & (proposal == rollout.ids[row]))


class Replay:
    """All steps of all rows of some decodes in an order that a seed decides, `batch` of them in a trace.

    A trace is evaluated whenever it is asked for, and not kept: of hidden states a model of 7 billion parameters has
    25 KB for each column of a canvas, terabytes for a thousand answers of 256 steps; tokens and step maps fit anywhere.
    """

    def __init__(
        self,
        predictor: MaskPredictor,
        rollouts: Sequence[Rollout],
        *,
        batch: int,
        layers: int,
        end_ids: Sequence[int] = (),
        run_seed: int = 0,
        most: int | None = None,
    ):
        """Draw the order; nothing is evaluated yet.

        Args:
            rollouts: decodes; a trace is of one of them.
            most: traces at most, the others are left out; None for all.
        """
        self._predictor, self._layers, self._end_ids = predictor, layers, end_ids
        random = generator(run_seed, "trace_lock", "replay")
        parts = []
        for rollout in rollouts:
            steps = torch.arange(int(rollout.steps.max()), device=rollout.steps.device)
            pairs = (steps < rollout.steps[:, None]).nonzero()  # a row and one of its steps
            order = torch.from_numpy(random.permutation(len(pairs))).to(pairs.device)
            parts += [(rollout, part) for part in pairs[order].split(batch)]
        self._parts = [parts[i] for i in random.permutation(len(parts))[:most]]

    def __len__(self) -> int:
        return len(self._parts)

    def __iter__(self) -> Iterator[Trace]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, i: int) -> Trace:
        rollout, pairs = self._parts[i]
        return trace(
            self._predictor, rollout, row=pairs[:, 0], step=pairs[:, 1], layers=self._layers, end_ids=self._end_ids
        )


def scene(
    ids: Tensor,
    attention_mask: Tensor,
    prompt: int,
    *,
    masked: Tensor,
    proposal: Tensor,
    confidence: Tensor,
    hidden: tuple[Tensor, ...],
    end_ids: Sequence[int],
) -> Scene:
    """The scene of canvases (B, T), from the proposal (B, T) of each masked position and its probability (B, T)."""
    ends = torch.isin(proposal, torch.tensor(end_ids, dtype=torch.long, device=ids.device))
    column = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    state = torch.where(masked, torch.where(ends, END, OPEN), torch.where(column < prompt, PROMPT, LOCKED))
    return Scene(
        hidden=hidden,
        confidence=confidence.where(masked, 1.0),
        state=state,
        position=(column - prompt).clamp(min=0),
        visible=attention_mask,
    )


def window(scene: Scene, length: Tensor) -> Tensor:
    """Columns (B, T) bool up to the last mask of the window of some length (B,) that begins at a row's first mask."""
    masked = scene.state >= OPEN
    column = torch.arange(masked.shape[1], device=masked.device)
    within = masked & (column < (masked.int().argmax(1) + length)[:, None])
    return column <= torch.where(within, column, -1).amax(1, keepdim=True)
