"""Masked-token predictor: logits of all positions of a partly masked canvas, from any model class.

A canvas is `ids` (B, T): a left-padded prompt, then a completion with mask tokens. Row i of the logits predicts token i,
and the mask token has probability 0. Each position sees all others but padding; in a block-causal model it sees its own
block and earlier ones, see `flowgrpo.mdlm.decoding.network.block_attention`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from flowgrpo.errors import InputError
from flowgrpo.mdlm.decoding.network.block_attention import block_causal, clean_prefix, positions
from flowgrpo.mdlm.decoding.network.mask_probe import Form, check_mask_token, logits_of, probe, probe_head
from flowgrpo.training.distributed.fsdp_lockstep import stands_in
from rewards.compute import leave_out_cudnn_attention

Tensor = torch.Tensor


class MaskPredictor:
    """A model as a predictor of masked tokens.

    Causal classes of transformers become bidirectional through a 4-d attention mask; models that take none get the usual
    2-d mask, or nothing. Probes at the start find the form that works, see `flowgrpo.mdlm.decoding.network.mask_probe`.

    Attributes:
        evaluations: rows the model was called with, not counting probes.
        vocab_size: number of columns of the logits.
        block_size: tokens of a block of a block-causal model; None for full attention.
        form: attention mask and positions of a batch without padding.
        selects: whether the model's head can compute the logits of some tokens alone.
        padded_form: attention mask and positions of a batch with padding. None if padding changes the logits, as in LLaDA,
            which ignores its mask; then rows of equal length are evaluated together, without padding.
    """

    def __init__(
        self, model: Any, mask_id: int, pad_id: int | None = None, *, shift: bool = False, block_size: int | None = None
    ):
        """Probe the model by a few forward passes, and switch cuDNN attention off for the whole process.

        Args:
            model: module or function of ids (B, T) that returns logits (B, T, V), or an object with `logits`; it gets
                `attention_mask`, `position_ids` and `use_cache` if its forward takes them.
            pad_id: fills rows up on the left; None if rows are never padded.
            shift: output i predicts token i + 1, as in Dream and other models that began autoregressive.

        Raises:
            InputError: the mask token is outside the vocabulary, is padding, or is not that of the model's config; the
                first position sees no later one; or a model with `block_size` cannot attend in blocks.
        """
        leave_out_cudnn_attention()
        self.model, self.mask_id, self.pad_id, self.shift, self.block_size = model, mask_id, pad_id, shift, block_size
        inner = model.get_base_model() if hasattr(model, "get_base_model") else getattr(model, "module", model)
        parameters = inspect.signature(getattr(inner, "forward", inner)).parameters  # not of a wrapper by peft or torch
        self._takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        self._takes = set(parameters)
        check_mask_token(self)
        training = getattr(model, "training", False)
        if training:
            model.eval()  # dropout would look like a change
        self.evaluations, self.selects = 0, False
        self.vocab_size, self.form, self.padded_form = probe(self)
        self.selects = probe_head(self)
        if training:
            model.train()
        self.evaluations = 0

    def logits(
        self, ids: Tensor, attention_mask: Tensor | None = None, start: int = 0, stop: int | None = None
    ) -> Tensor:
        """Return logits (B, stop - start, V) that predict columns `start:stop` of ids (B, T); -inf for the mask token.

        Logits are float32 or finer. `attention_mask` (B, T) is 0 or False at padding. A block-causal model does not evaluate
        the blocks behind `stop`.
        """
        return self.logits_and_hidden(ids, attention_mask, start=start, stop=stop, layers=0)[0]

    def logits_and_hidden(
        self, ids: Tensor, attention_mask: Tensor | None, *, start: int, stop: int | None, layers: int
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return what `logits` does, and the last `layers` hidden states (B, T, H) of all columns, shifted like the logits.

        Raises InputError if the model returns fewer hidden states.
        """
        stop = ids.shape[1] if stop is None else stop
        form, mask = self._choose_form(attention_mask)
        if form is None:
            assert mask is not None
            return self._by_length(ids, mask, start=start, stop=stop, layers=layers)
        wanted = {"output_hidden_states": True} if layers else {}
        self.evaluations += len(ids)
        if self.block_size is not None and not layers:
            end = self.block_end(ids, mask, stop)
            ids, mask = ids[:, :end], None if mask is None else mask[:, :end]
        evaluate = partial(self.forward, form, ids, mask, **wanted)
        logits, out = self.columns(evaluate, ids, mask, start=start, stop=stop)
        states = (getattr(out, "hidden_states", None) or ()) if layers else ()
        if len(states) < layers:
            raise InputError(f"model: it returns {len(states)} hidden states, a learned commitment takes {layers}")
        hidden = tuple(self.align(state, mask) for state in states[-layers:]) if layers else ()
        return logits, hidden

    def columns(
        self, evaluate: Callable[[], Any], ids: Tensor, mask: Tensor | None, *, start: int, stop: int
    ) -> tuple[Tensor, Any]:
        """Call the model by `evaluate()`; return logits (B, stop - start, V), as `logits` does, and the model's output.

        `ids` and `mask` (B, T) are the model's inputs. The head computes only columns `start:stop` if it can.
        """
        align = partial(self.align, mask=mask, start=start, stop=stop)
        select = self.selects and (self.shift or stop - start < ids.shape[1])  # else the head needs all columns anyway
        with self._head_sees(align) if select else nullcontext():
            out = evaluate()
        return self.finished(logits_of(out) if select else align(logits_of(out))), out

    def block_start(self, mask: Tensor, column: int) -> int:
        """Return the first column of the block that holds `column`: the smallest over the rows of `mask` (B, T)."""
        assert self.block_size is not None
        padding = (~mask).sum(1)
        return int(((column - padding) // self.block_size * self.block_size + padding).min())

    def block_end(self, ids: Tensor, mask: Tensor | None, stop: int) -> int:
        """Return the end of the last block that begins before column `stop`: the largest over the rows, at most T."""
        assert self.block_size is not None
        padding = torch.zeros(1, dtype=torch.long) if mask is None else (~mask).sum(1)
        blocks = (stop - padding + self.block_size - 1) // self.block_size
        return min(int((blocks * self.block_size + padding).max()), ids.shape[1])

    def _by_length(
        self, ids: Tensor, mask: Tensor, *, start: int, stop: int, layers: int
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Run `logits_and_hidden` without padding, once for each length of rows; results are 0 at the padding."""
        rows, parts = [], []
        for width, indices in _equally_padded(mask, torch.ones_like(mask[:, 0])):
            logits, hidden = self.logits_and_hidden(
                ids[indices, width:], None, start=max(start - width, 0), stop=stop - width, layers=layers
            )
            tensors = zip((logits, *hidden), (stop - start, *[ids.shape[1]] * layers), strict=True)
            rows.append(indices)
            parts.append([torch.nn.functional.pad(x, (0, 0, columns - x.shape[1], 0)) for x, columns in tensors])
        order = torch.cat(rows).argsort()
        logits, *hidden = (torch.cat(tensors)[order] for tensors in zip(*parts, strict=True))
        return logits, tuple(hidden)

    def logits_at(
        self, ids: Tensor, attention_mask: Tensor | None, where: Tensor, clean: Tensor | None = None
    ) -> Tensor:
        """Return logits (N, V) that predict N tokens, row by row, in the model's own precision; -inf for the mask token.

        The head computes only these tokens if it can.

        Args:
            where: (B, T) bool, the tokens; False at padding.
            clean: (B, T) canvas, for block-causal models: each block of `ids` is predicted from the earlier blocks of
                `clean`, as in decoding block by block. One evaluation of a longer row covers all blocks. None takes `ids`.
        """
        form, mask = self._choose_form(attention_mask)
        if form is None:
            assert mask is not None
            return self._at_by_length(ids, mask, where, clean)
        self.evaluations += len(ids)
        rows, columns = where.nonzero(as_tuple=True)
        source, evaluate = columns, partial(self.forward, form, ids, mask)
        if self.shift:  # as `aligned` does
            source = (columns - 1).clamp(min=0 if mask is None else mask.int().argmax(1)[rows])
        if clean is not None:
            evaluate, source = self._after_clean(ids, clean, mask, at=(rows, columns), source=source)
        with self._head_sees(lambda hidden: hidden[rows, source][None]) if self.selects else nullcontext():
            logits = logits_of(evaluate())
        return self._without_mask_token(logits[0] if self.selects else logits[rows, source])

    def _after_clean(
        self, ids: Tensor, clean: Tensor, mask: Tensor | None, *, at: tuple[Tensor, Tensor], source: Tensor
    ) -> tuple[Callable[[], Any], Tensor]:
        """Build the evaluation of a clean canvas followed by a masked copy in the same row, under BD3-LM's mask.

        `at` is row and column (N,) of the requested tokens; `source` (N,) the columns of the outputs that predict them.
        Returns the call of the model, and the columns (N,) of those outputs in the longer row.
        """
        assert self.block_size is not None
        length, device = ids.shape[1], ids.device
        seen = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
        first = max(int(at[1].min()) - self.block_size + 1, 0)  # the blocks of the requested tokens begin here or later
        column = torch.cat([torch.arange(length, device=device), torch.arange(first, length, device=device)])
        noisy = torch.arange(len(column), device=device) >= length
        place = positions(seen)
        block = place // self.block_size
        visible = clean_prefix(block[:, column], noisy) & seen[:, None, column]
        options: dict[str, Any] = {"use_cache": False} if self.takes("use_cache") else {}
        evaluate = partial(
            self.model,
            torch.cat([clean, ids[:, first:]], dim=1),
            attention_mask=self.additive(visible, len(column)),
            position_ids=place[:, column],
            **options,
        )
        # With `shift`, the output that predicts a block's first token belongs to an earlier, finished block.
        finished = block[at[0], source] < block[at]
        return evaluate, torch.where(finished, source, length + source - first)

    def _at_by_length(self, ids: Tensor, mask: Tensor, where: Tensor, clean: Tensor | None) -> Tensor:
        """Run `logits_at` without padding, once for each length of rows."""
        number = where.flatten().cumsum(0).view_as(where) - 1  # of each requested token in the result
        parts, order = [], []
        for width, indices in _equally_padded(mask, where.any(1)):
            clean_rows = None if clean is None else clean[indices, width:]
            parts.append(self.logits_at(ids[indices, width:], None, where[indices, width:], clean_rows))
            order.append(number[indices][where[indices]])
        return torch.cat(parts)[torch.cat(order).argsort()]

    @contextmanager
    def _head_sees(self, choose: Callable[[Tensor], Tensor]) -> Iterator[None]:
        """Within the context, give the head `choose(hidden)` (1 or B, N, H) instead of the hidden states (B, T, H)."""
        head = self.head()
        assert head is not None  # else `selects` is False
        chosen = head.register_forward_pre_hook(
            lambda _, given: None if stands_in() else (choose(given[0]), *given[1:])
        )
        try:
            yield
        finally:
            chosen.remove()

    def head(self) -> torch.nn.Module | None:
        """Return the output layer, from hidden states to logits, with its adapter; None if the model names none."""
        get_head = getattr(self.model, "get_output_embeddings", None)
        return get_head() if get_head is not None else None

    def _choose_form(self, attention_mask: Tensor | None) -> tuple[Form | None, Tensor | None]:
        """Return the form for this batch (None: padding changes the logits), and the mask, None without padding."""
        if attention_mask is None or attention_mask.all():
            return self.form, None
        return self.padded_form, attention_mask.bool()

    def guide(
        self,
        ids: Tensor,
        attention_mask: Tensor | None,
        scale: float | Tensor,
        *,
        prompt: int,
        start: int = 0,
        stop: int | None = None,
    ) -> Tensor:
        """Return logits under classifier-free guidance, u + (scale + 1)(c - u); u does not see the first `prompt` columns.

        The guidance of LLaDA's code (arXiv 2502.09992), `scale` a number or (B,), 0 for none. Two evaluations a row.
        """
        blind = ids.clone()
        blind[:, :prompt] = self.mask_id
        twice = None if attention_mask is None else torch.cat([attention_mask, attention_mask])
        c, u = self.logits(torch.cat([ids, blind]), twice, start, stop).chunk(2)
        factor = torch.as_tensor(scale, dtype=c.dtype, device=c.device).reshape(-1, 1, 1) + 1
        return self.finished(u + factor * (c - u))  # sets the mask token, NaN after -inf - -inf, to -inf again

    def forward(self, form: Form, ids: Tensor, mask: Tensor | None, **wanted: Any) -> Any:
        """Return the model's output for a whole canvas under a form; `mask` (B, T) bool is False at padding."""
        options = dict(wanted)
        if form.attention == "4d":
            visible = self.visible(torch.ones_like(ids, dtype=torch.bool) if mask is None else mask)
            options["attention_mask"] = self.additive(visible, ids.shape[1])
        elif form.attention == "2d":
            options["attention_mask"] = torch.ones_like(ids) if mask is None else mask.long()
        if form.positions and mask is not None:
            options["position_ids"] = positions(mask)
        if self.takes("use_cache"):
            options.setdefault("use_cache", False)
        return self.model(ids, **options)

    def takes(self, argument: str) -> bool:
        """Return whether the model's forward has an argument of this name."""
        return self._takes_all or argument in self._takes

    @property
    def cache_argument(self) -> str:
        """Name of the cache argument of the model's forward; transformers renamed it in 5.24."""
        return "cache" if "cache" in self._takes else "past_key_values"

    def visible(self, seen: Tensor, first: int = 0) -> Tensor:
        """Return which columns each column from `first` on sees, (B, Q, T) bool; (B, 1, T) if all see the same.

        `seen` (B, T) bool is False at padding.
        """
        if self.block_size is None:
            return seen[:, None, :]
        block = positions(seen) // self.block_size
        return block_causal(block[:, first:], block) & seen[:, None, :]

    def additive(self, visible: Tensor, queries: int) -> Tensor:
        """Return the additive attention mask (B, 1, queries, K) of visible keys (B, Q or 1, K) bool."""
        dtype = getattr(self.model, "dtype", self._parameter().dtype)
        mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
        return mask.masked_fill(~visible, torch.finfo(dtype).min)[:, None].expand(-1, -1, queries, -1)

    def align(self, out: Tensor, mask: Tensor | None, start: int = 0, stop: int | None = None) -> Tensor:
        """Return outputs (B, stop - start, ...) shifted so that output i predicts token i.

        With `shift` a row's first token, which no output predicts, takes the output at its own place.
        """
        stop = out.shape[1] if stop is None else stop
        if not self.shift:
            return out[:, start:stop]
        first = 0 if mask is None else mask.int().argmax(1, keepdim=True)  # (B, 1), first column that is not padding
        source = (torch.arange(start, stop, device=out.device) - 1).expand(len(out), -1).clamp(min=first)
        return out[torch.arange(len(out), device=out.device)[:, None], source]

    def finished(self, logits: Tensor) -> Tensor:
        """Return logits in float32 or finer, with -inf for the mask token."""
        return self._without_mask_token(logits, torch.promote_types(logits.dtype, torch.float32))

    def _without_mask_token(self, logits: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        logits = logits.to(dtype or logits.dtype, copy=True)
        logits[..., self.mask_id] = -torch.inf  # `index_fill` would copy the index to the device and wait for it
        return logits

    @property
    def hidden_size(self) -> int | None:
        """Width of the model's hidden states; None if its config does not say."""
        config = getattr(self.model, "config", None)
        return getattr(config, "hidden_size", getattr(config, "d_model", None))

    @property
    def device(self) -> torch.device:
        """The model's device."""
        return self._parameter().device

    def _parameter(self) -> Tensor:
        """Return any parameter of the model; an empty tensor for a function."""
        return next(iter(getattr(self.model, "parameters", tuple)()), torch.empty(0))


def _equally_padded(mask: Tensor, chosen: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Group the chosen rows (B,) bool by their padding: yield each number of padded columns with its rows' indices."""
    padding = (~mask).sum(1)  # (B,)
    for width in padding[chosen].unique().tolist():
        yield width, ((padding == width) & chosen).nonzero()[:, 0]
