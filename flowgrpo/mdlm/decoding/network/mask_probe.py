"""What a model takes, found out by a few forwards of a few tokens, not believed from a class name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from flowgrpo.errors import InputError

PROBE_LENGTH, PROBE_PADDING = 8, 3
UNCHANGED = 1e-6  # of the largest logit: a model that changes less has not seen the change
REFUSALS = (ValueError, RuntimeError, TypeError, IndexError, AttributeError)  # of models that are called otherwise
PADDING_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.1}


@dataclass(frozen=True)
class Form:
    """How a model is told what it may see: by which attention mask, and whether it is handed positions."""

    attention: str  # 4d | 2d | none
    positions: bool = False


class Probed(Protocol):
    """What is asked of a predictor (`MaskPredictor`) that does not know its model yet."""

    model: Callable[..., Any]
    mask_id: int
    pad_id: int | None
    block_size: int | None
    selects: bool

    @property
    def device(self) -> torch.device:
        """Where the model is."""

    def takes(self, argument: str) -> bool:
        """Whether the model's forward has an argument of that name."""

    def forward(self, form: Form, ids: Tensor, mask: Tensor | None) -> Any:
        """What the model returns for tokens (B, T), told by `form` what it may see."""

    def logits_at(self, ids: Tensor, attention_mask: Tensor | None, where: Tensor) -> Tensor:
        """Logits (N, V) of the tokens at `where` (B, T) bool."""

    def head(self) -> torch.nn.Module | None:
        """The layer that makes logits; None if none is known."""


def check_mask_token(predictor: Probed) -> None:
    """See that the mask token is in the vocabulary, is not padding, and is the one that the model's config names.

    Raises:
        InputError: it is not.
    """
    config = getattr(predictor.model, "config", None)
    size, named = getattr(config, "vocab_size", None), getattr(config, "mask_token_id", None)
    mine = predictor.mask_id
    if mine == predictor.pad_id:
        raise InputError(f"model.mask_id: {mine} is the padding token too, they must differ")
    if isinstance(size, int) and not 0 <= mine < size:
        raise InputError(f"model.mask_id: {mine} is outside the vocabulary of {size} tokens")
    if isinstance(named, int) and named != mine:
        raise InputError(f"model.mask_id: {mine} is not {named}, which the model's config names")


@torch.no_grad()
def probe(predictor: Probed) -> tuple[int, Form, Form | None]:
    """Size of the vocabulary, and the forms under which the model sees later tokens, and does not see padding."""
    device = predictor.device
    a, b, *_ = (i for i in range(4) if i not in (predictor.mask_id, predictor.pad_id))
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
def probe_head(predictor: Probed) -> bool:
    """Whether the logits of some tokens, asked of the head alone, are those that the whole canvas has."""
    a, b, *_ = (i for i in range(4) if i not in (predictor.mask_id, predictor.pad_id))
    ids = torch.tensor([[a, b] * (PROBE_LENGTH // 2), [b] * PROBE_LENGTH], device=predictor.device)
    where = (
        torch.tensor([[1, 0, 0, 1] * (PROBE_LENGTH // 4), [0, 1] * (PROBE_LENGTH // 2)], device=predictor.device) > 0
    )
    whole = predictor.logits_at(ids, None, where)
    try:
        predictor.selects = predictor.head() is not None
        asked = predictor.logits_at(ids, None, where)
    except REFUSALS:
        return False
    known = whole.isfinite()
    gap = (asked - whole)[known].abs().max() if asked.shape == whole.shape else torch.inf
    return predictor.selects and bool(gap <= PADDING_TOLERANCE[whole.dtype] * whole[known].abs().max())


def _bidirectional_form(predictor: Probed, ids: Tensor) -> Form:
    others = torch.cat([ids[:, :1], ids[:, :-1]], dim=1)  # every token but the first is another
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


def _check_blocks(predictor: Probed, form: Form, ids: Tensor, size: int) -> None:
    """See that the model can be told to attend in blocks, by changing the later of two.

    Raises:
        InputError: it cannot.
    """
    if form.attention != "4d" or not predictor.takes("position_ids"):
        raise InputError("model.attention: blocks need a model that takes a 4-d attention mask and position_ids")
    two = ids[:, :2].repeat(1, size)
    changed = torch.cat([two[:, :size], ids[:, :1].expand(-1, size)], dim=1)
    first, second = (logits_of(predictor.forward(form, x, None))[:, :size] for x in (two, changed))
    if (first - second).abs().max() > PADDING_TOLERANCE[first.dtype] * first.abs().max():
        raise InputError("model.attention: the first block sees the second, whatever mask the model is given")


def logits_of(out: Any) -> Tensor:
    """The logits of what a model returned: that itself, or its `logits`."""
    return out if isinstance(out, torch.Tensor) else out.logits
