"""Probes: a few forward passes on a few tokens show which attention mask and positions a model needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from flowgrpo.errors import InputError

PROBE_LENGTH, PROBE_PADDING = 8, 3
UNCHANGED = 1e-6  # changes below this share of the largest logit count as none
REFUSALS = (ValueError, RuntimeError, TypeError, IndexError, AttributeError)  # of models that take other arguments
PADDING_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.1}


@dataclass(frozen=True)
class Form:
    """The inputs by which a model learns what it may see: the kind of attention mask, and whether positions are passed."""

    attention: str  # 4d | 2d | none
    positions: bool = False


class _Predictor(Protocol):
    """The parts of a `MaskPredictor` that a probe needs."""

    model: Callable[..., Any]
    mask_id: int
    pad_id: int | None
    block_size: int | None
    selects: bool

    @property
    def device(self) -> torch.device: ...

    def takes(self, argument: str) -> bool: ...

    def forward(self, form: Form, ids: Tensor, mask: Tensor | None) -> Any: ...

    def logits_at(self, ids: Tensor, attention_mask: Tensor | None, where: Tensor) -> Tensor: ...

    def head(self) -> torch.nn.Module | None: ...


def check_mask_token(predictor: _Predictor) -> None:
    """Raise InputError if the mask token is outside the vocabulary, is padding, or is not that of the model's config."""
    config = getattr(predictor.model, "config", None)
    size, named = getattr(config, "vocab_size", None), getattr(config, "mask_token_id", None)
    mask_id = predictor.mask_id
    if mask_id == predictor.pad_id:
        raise InputError(f"model.mask_id: {mask_id} is the padding token too, they must differ")
    if isinstance(size, int) and not 0 <= mask_id < size:
        raise InputError(f"model.mask_id: {mask_id} is outside the vocabulary of {size} tokens")
    if isinstance(named, int) and named != mask_id:
        raise InputError(f"model.mask_id: {mask_id} is not {named}, which the model's config names")


@torch.no_grad()
def probe(predictor: _Predictor) -> tuple[int, Form, Form | None]:
    """Return the vocabulary size, a form under which positions see later tokens, and a form that hides padding.

    The last is None if padding always changes the logits. Raises InputError if no form works.
    """
    device = predictor.device
    a, b = _two_tokens(predictor)
    ids = torch.tensor([[a, b] * (PROBE_LENGTH // 2)], device=device)
    form = _bidirectional_form(predictor, ids)
    if predictor.block_size is not None:
        _check_blocks(predictor, form, ids, predictor.block_size)
    plain = logits_of(predictor.forward(form, ids, None))
    size = plain.shape[-1]
    if not 0 <= predictor.mask_id < size:
        raise InputError(f"model.mask_id: {predictor.mask_id} is outside the vocabulary of {size} tokens")
    if predictor.pad_id is None or form.attention == "none":
        return size, form, None
    mask = torch.arange(PROBE_PADDING + PROBE_LENGTH, device=device)[None] >= PROBE_PADDING
    padded = torch.cat([ids.new_full((1, PROBE_PADDING), predictor.pad_id), ids], dim=1)
    tolerance = PADDING_TOLERANCE[plain.dtype] * plain.abs().max()
    for handed in (True, False) if predictor.takes("position_ids") else (False,):
        padded_form = Form(form.attention, handed)
        out = logits_of(predictor.forward(padded_form, padded, mask))
        if (out[:, PROBE_PADDING:] - plain).abs().max() <= tolerance:
            return size, form, padded_form
    return size, form, None


@torch.no_grad()
def probe_head(predictor: _Predictor) -> bool:
    """Return whether the head, given the hidden states of some tokens only, computes the same logits for these tokens."""
    a, b = _two_tokens(predictor)
    ids = torch.tensor([[a, b] * (PROBE_LENGTH // 2), [b] * PROBE_LENGTH], device=predictor.device)
    columns = [[1, 0, 0, 1] * (PROBE_LENGTH // 4), [0, 1] * (PROBE_LENGTH // 2)]
    where = torch.tensor(columns, device=predictor.device) > 0
    whole = predictor.logits_at(ids, None, where)
    try:
        predictor.selects = predictor.head() is not None
        alone = predictor.logits_at(ids, None, where)
    except REFUSALS:
        return False
    finite = whole.isfinite()
    gap = (alone - whole)[finite].abs().max() if alone.shape == whole.shape else torch.inf
    return predictor.selects and bool(gap <= PADDING_TOLERANCE[whole.dtype] * whole[finite].abs().max())


def _two_tokens(predictor: _Predictor) -> list[int]:
    return [i for i in range(4) if i not in (predictor.mask_id, predictor.pad_id)][:2]


def _bidirectional_form(predictor: _Predictor, ids: Tensor) -> Form:
    others = torch.cat([ids[:, :1], ids[:, :-1]], dim=1)  # every token but the first differs from `ids`
    refused = []
    known = ("4d", "2d") if predictor.block_size is None else ("4d",)
    for attention in known if predictor.takes("attention_mask") else ("none",):
        form = Form(attention)
        try:
            first, second = (logits_of(predictor.forward(form, x, None))[0, 0] for x in (ids, others))
        except REFUSALS as error:
            refused.append(f"a {attention} attention mask it refuses ({str(error).splitlines()[0]})")
            continue
        if (first - second).abs().max() > UNCHANGED * first.abs().max():
            return form
    hint = f"; {', '.join(refused)}" if refused else ""
    raise InputError(f"model: its first position sees no later token, masked diffusion needs that{hint}")


def _check_blocks(predictor: _Predictor, form: Form, ids: Tensor, size: int) -> None:
    """Raise InputError unless the model can attend in blocks: a change of the second block must not reach the first."""
    if form.attention != "4d" or not predictor.takes("position_ids"):
        raise InputError("model.attention: blocks need a model that takes a 4-d attention mask and position_ids")
    two = ids[:, :2].repeat(1, size)
    changed = torch.cat([two[:, :size], ids[:, :1].expand(-1, size)], dim=1)
    first, second = (logits_of(predictor.forward(form, x, None))[:, :size] for x in (two, changed))
    if (first - second).abs().max() > PADDING_TOLERANCE[first.dtype] * first.abs().max():
        raise InputError("model.attention: the first block sees the second, whatever mask the model is given")


def logits_of(out: Any) -> Tensor:
    """Return the logits of a model's output: the output itself, or its `logits`."""
    return out if isinstance(out, torch.Tensor) else out.logits
