"""Training examples of TraceLock (arXiv 2605.24697 and its code): the steps of finished decodes.

At each step a frozen predictor proposes its likeliest token for every masked position; a proposal is correct if the
finished answer holds that token. Step maps restore each step's canvas; evaluating it once gives its proposals.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from flowgrpo.mdlm.decoding.decode import Rollout
from flowgrpo.mdlm.decoding.network.predictor import MaskPredictor
from samplers.noise import generator

Tensor = torch.Tensor

PROMPT, LOCKED, OPEN, END = range(4)  # states of a position; END is masked and proposes the end


@dataclass(frozen=True, kw_only=True)
class Scene:
    """A controller's view of B sequences of T tokens."""

    hidden: tuple[Tensor, ...]  # last hidden states (B, T, H), from the earlier to the later layer
    confidence: Tensor  # (B, T) probability of the proposal; 1 where there is a token
    state: Tensor  # (B, T) PROMPT, LOCKED, OPEN or END
    position: Tensor  # (B, T) index in the completion, 0 in the prompt
    visible: Tensor  # (B, T) bool, False at padding and behind the window


@dataclass(frozen=True)
class Trace:
    """One step of several decodes: whole canvases, and labels (B, T) bool, True where the answer holds the proposal."""

    scene: Scene
    label: Tensor


@torch.no_grad()
def trace(
    predictor: MaskPredictor, rollout: Rollout, *, row: Tensor, step: Tensor, layers: int, end_ids: Sequence[int] = ()
) -> Trace:
    """Return a trace of some rows of a rollout: canvas i is that of row `row[i]` before its step `step[i]`, both (R,).

    It holds the last `layers` hidden states. Takes one model evaluation per canvas. `end_ids` end or pad an answer.
    """
    ids, mask = rollout.ids[row], rollout.attention_mask[row]
    ids[:, rollout.prompt :][rollout.step_map[row] >= step[:, None]] = predictor.mask_id
    logits, hidden = predictor.logits_and_hidden(ids, mask, start=0, stop=None, layers=layers)
    confidence, proposal = logits.softmax(-1).max(-1)
    masked = ids == predictor.mask_id
    current = scene(
        ids,
        mask,
        rollout.prompt,
        masked=masked,
        proposal=proposal,
        confidence=confidence,
        hidden=hidden,
        end_ids=end_ids,
    )
    return Trace(current, masked & (proposal == rollout.ids[row]))


class Replay:
    """All steps of all rows of some decodes, in an order drawn from a seed; each trace holds `batch` of these steps.

    A trace is computed on access and not stored: hidden states of a model of 7 billion parameters take 25 KB a column.
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
        """Draw the order of at most `most` traces; all steps of a trace come from one decode."""
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


Traces = list[Trace] | Replay


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
    """Build the scene of canvases (B, T) from the proposal (B, T) of each masked position and its probability (B, T)."""
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
    """Return the columns (B, T) bool up to the last mask within `length` (B,) columns from each row's first mask."""
    masked = scene.state >= OPEN
    column = torch.arange(masked.shape[1], device=masked.device)
    within = masked & (column < (masked.int().argmax(1) + length)[:, None])
    return column <= torch.where(within, column, -1).amax(1, keepdim=True)
