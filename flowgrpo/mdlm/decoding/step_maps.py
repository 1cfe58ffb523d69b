"""Rollouts rebuilt from the completions of an engine: tokens, and the step that committed each.

Committed tokens stay, so tokens and steps give every canvas of the decode. Our model scores each token on the canvas on
which it was committed; the engine need not return log-probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flowgrpo.errors import InputError
from flowgrpo.mdlm.decoding.decode import GIVEN, Rollout
from flowgrpo.mdlm.decoding.network.predictor import MaskPredictor
from samplers.batches import batched

Tensor = torch.Tensor


@torch.no_grad()
def rebuild_rollout(
    predictor: MaskPredictor,
    prompt: Tensor,
    completions: Sequence[Sequence[int]],
    steps: Sequence[Sequence[int]],
    *,
    length: int,
    fill_id: int,
    attention_mask: Tensor | None = None,
    micro_batch: int | None = None,
    scored: bool = True,
) -> Rollout:
    """Return the rollout that `decode` would have returned, with log-probabilities of our model at temperature 1.

    Scoring takes one evaluation for each row and step, for `micro_batch` rows at a time; without `scored` the
    log-probabilities are 0. A completion shorter than `length` stopped early and is filled up with `fill_id`.

    Args:
        prompt: (B, P) tokens, padded on the left; `attention_mask` is False at padding.
        completions: tokens of each of the B rows, at most `length`.
        steps: step that committed each token, counted over the whole completion, not per block. The first number is free,
            and gaps are allowed; -1 marks a given token.

    Raises:
        InputError: rows, tokens and steps do not fit each other, the length or the vocabulary.
    """
    if not len(prompt) == len(completions) == len(steps):
        raise InputError(f"steps: {len(steps)} rows of them, {len(completions)} of tokens and {len(prompt)} prompts")
    known = torch.ones_like(prompt) if attention_mask is None else attention_mask
    tokens = prompt.new_full((len(prompt), length), fill_id)
    step_map = torch.full_like(tokens, GIVEN)
    taken = torch.zeros(len(prompt), dtype=torch.long, device=prompt.device)
    for row, (completion, row_steps) in enumerate(zip(completions, steps, strict=True)):
        check(f"row {row}", completion, row_steps, length=length, predictor=predictor)
        order = {step: place for place, step in enumerate(sorted(set(row_steps) - {GIVEN}))}
        taken[row] = len(order)
        step_map[row] = len(order)  # stays behind the end of the completion
        tokens[row, : len(completion)] = torch.as_tensor(completion).to(tokens)
        step_map[row, : len(completion)] = torch.tensor([order.get(step, GIVEN) for step in row_steps]).to(tokens)
    rollout = Rollout(
        ids=torch.cat([prompt, tokens], dim=1),
        attention_mask=torch.cat([known.bool(), torch.ones_like(tokens, dtype=torch.bool)], dim=1),
        step_map=step_map,
        commit_logp=torch.zeros(tokens.shape, dtype=torch.float64, device=prompt.device),
        nfe=taken.clone(),
        steps=taken,
        branched=taken.new_zeros(len(taken), 0),
        drafts=taken.new_zeros(len(taken), 0, length, dtype=torch.int32),
    )
    for part in batched(range(len(prompt) if scored else 0), micro_batch or len(prompt)):
        rows = torch.arange(part.start, part.stop, device=prompt.device)
        for step in range(int(taken[rows].max())):
            _score(predictor, rollout, rows[taken[rows] > step], step)
    return rollout


def _score(predictor: MaskPredictor, rollout: Rollout, rows: Tensor, step: int) -> None:
    canvas = rollout.canvas(step, predictor.mask_id)[rows]
    committed = rollout.step_map[rows] == step
    where = torch.nn.functional.pad(committed, (rollout.prompt, 0))
    logits = predictor.logits_at(canvas, rollout.attention_mask[rows], where)
    tokens = rollout.completion[rows][committed]
    scored = logits.double().log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    place = committed.nonzero()
    rollout.commit_logp[rows[place[:, 0]], place[:, 1]] = scored


def check(row: str, tokens: Sequence[int], steps: Sequence[int], *, length: int, predictor: MaskPredictor) -> None:
    """Raise InputError, naming the row, for tokens and steps that no decode could have returned."""
    if len(tokens) != len(steps):
        raise InputError(f"steps: {row} has {len(tokens)} tokens and {len(steps)} steps")
    if len(tokens) > length:
        raise InputError(f"completions: {row} has {len(tokens)} tokens, more than its {length} columns")
    for name, values, least in (("completions", tokens, 0), ("steps", steps, GIVEN)):
        for value in values:
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise InputError(f"{name}: {row} has {repr(value)[:40]}, not an integer of at least {least}")
    wrong = next((token for token in tokens if token >= predictor.vocab_size or token == predictor.mask_id), None)
    if wrong is not None:
        raise InputError(f"completions: {row} has the token {str(wrong)[:20]}, which no step of this model commits")
