"""The model behind one door: logits of every position of a partly masked canvas, whatever class made them.

A canvas is `ids` (B, T): a left-padded prompt, then a completion whose unknown tokens are the mask token. Row i of the
logits is about token i, the mask token is never predicted, and every position sees every other one but padding. Of a
block-causal model it sees those of its own block and of earlier ones; see `flowgrpo.mdlm.decoding.network.block_attention`.
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
    """Any model that returns logits, as a predictor of masked tokens.

    Classes of transformers that are causal by themselves become bidirectional through a 4-d attention mask; models that
    take none are given the usual 2-d mask, or nothing. Which form works is found out at the start, by changing tokens and
    by padding a row; see `flowgrpo.mdlm.decoding.network.mask_probe`. Block-causal attention takes a 4-d mask.

    Attributes:
        evaluations: rows that the model was called with so far, but for the probe.
        vocab_size: number of columns of the logits.
        block_size: tokens of a block of a block-causal model; None for full attention.
        form: of a batch without padding.
        selects: whether the model's head may be asked for the logits of some tokens alone.
        padded_form: of a batch with padding; None if the model's logits change with it, as LLaDA's do, which ignores its
            mask: then rows of one length are evaluated together, without their padding.
    """

    def __init__(
        self,
        model: Any,
        mask_id: int,
        pad_id: int | None = None,
        *,
        shift: bool = False,
        block_size: int | None = None,
    ):
        """Probe the model, with a few forwards of a few tokens; no attention of the process is cuDNN's from here on.

        Args:
            model: module or function of ids (B, T) that returns logits (B, T, V), or an object that has them as `logits`;
                it is handed `attention_mask`, `position_ids` and `use_cache` where its forward takes them.
            mask_id: the token of an unknown position.
            pad_id: fills rows up on the left; None if there are no such rows.
            shift: whether output i is about token i + 1, as in Dream and others that began autoregressive.
            block_size: tokens of a block, if attention is to be block-causal.

        Raises:
            InputError: the mask token is not in the vocabulary, is the padding token, or is not the one that the model's
                config names; no position sees a later one; or the model cannot be told to attend in blocks.
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
        """Aligned logits (B, stop - start, V) of some columns, float32 or finer; -inf for the mask token.

        Of a block-causal model no later block than those of the columns is evaluated.

        Args:
            ids: (B, T).
            attention_mask: (B, T), 0 or False at padding; None if there is none.
            start: first column that is returned.
            stop: column after the last one; None is T.
        """
        return self.logits_and_hidden(ids, attention_mask, start=start, stop=stop, layers=0)[0]

    def logits_and_hidden(
        self, ids: Tensor, attention_mask: Tensor | None, *, start: int, stop: int | None, layers: int
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The same logits, and the last `layers` hidden states (B, T, H) of all columns, aligned like logits.

        Raises:
            InputError: the model returns fewer hidden states.
        """
        stop = ids.shape[1] if stop is None else stop
        form, mask = self._told(attention_mask)
        if form is None:
            assert mask is not None
            return self._by_length(ids, mask, start=start, stop=stop, layers=layers)
        wanted = {"output_hidden_states": True} if layers else {}
        self.evaluations += len(ids)
        if self.block_size is not None and not layers:
            seen = self.block_end(ids, mask, stop)
            ids, mask = ids[:, :seen], None if mask is None else mask[:, :seen]
        evaluate = partial(self.forward, form, ids, mask, **wanted)
        logits, out = self.columns(evaluate, ids, mask, start=start, stop=stop)
        states = (getattr(out, "hidden_states", None) or ()) if layers else ()
        if len(states) < layers:
            raise InputError(f"model: it returns {len(states)} hidden states, a learned commitment takes {layers}")
        hidden = tuple(self.aligned(state, mask) for state in states[-layers:]) if layers else ()
        return logits, hidden

    def columns(
        self, evaluate: Callable[[], Any], ids: Tensor, mask: Tensor | None, *, start: int, stop: int
    ) -> tuple[Tensor, Any]:
        """Aligned logits (B, stop - start, V) of some columns, as of `logits`, and all that a call of the model returns.

        Where the model lets its head be asked for them alone, no other logits are computed.

        Args:
            evaluate: calls the model.
            ids, mask: what it is called with, (B, T).
            start, stop: as of `logits`, among these columns.
        """
        align = partial(self.aligned, mask=mask, start=start, stop=stop)
        select = self.selects and (self.shift or stop - start < ids.shape[1])  # else it sees these columns anyway
        with self._head_sees(align) if select else nullcontext():
            out = evaluate()
        return self.finished(logits_of(out) if select else align(logits_of(out))), out

    def block_start(self, mask: Tensor, column: int) -> int:
        """First column of the block that holds a column, in the row of a mask (B, T) bool where it begins first."""
        assert self.block_size is not None
        padding = (~mask).sum(1)
        return int(((column - padding) // self.block_size * self.block_size + padding).min())

    def block_end(self, ids: Tensor, mask: Tensor | None, stop: int) -> int:
        """Column after the last block that holds a column before `stop`, in the row where it ends last; at most T."""
        assert self.block_size is not None
        padding = torch.zeros(1, dtype=torch.long) if mask is None else (~mask).sum(1)
        blocks = (stop - padding + self.block_size - 1) // self.block_size
        return min(int((blocks * self.block_size + padding).max()), ids.shape[1])

    def _by_length(
        self, ids: Tensor, mask: Tensor, *, start: int, stop: int, layers: int
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """`logits_and_hidden` of rows with as much padding at a time, without it; 0 where it was."""
        rows, parts = [], []
        for width, own in _equally_padded(mask, torch.ones_like(mask[:, 0])):
            logits, hidden = self.logits_and_hidden(
                ids[own, width:], None, start=max(start - width, 0), stop=stop - width, layers=layers
            )
            tensors = zip((logits, *hidden), (stop - start, *[ids.shape[1]] * layers), strict=True)
            rows.append(own)
            parts.append([torch.nn.functional.pad(x, (0, 0, columns - x.shape[1], 0)) for x, columns in tensors])
        order = torch.cat(rows).argsort()
        logits, *hidden = (torch.cat(tensors)[order] for tensors in zip(*parts, strict=True))
        return logits, tuple(hidden)

    def logits_at(
        self, ids: Tensor, attention_mask: Tensor | None, where: Tensor, clean: Tensor | None = None
    ) -> Tensor:
        """Aligned logits (N, V) of N tokens, row by row, in the model's own precision; -inf for the mask token.

        Where the model lets its head be asked for them alone, no other logits are computed.

        Args:
            ids, attention_mask: as for `logits`.
            where: (B, T) bool, the tokens; False at padding.
            clean: (B, T) of a block-causal model, the canvas that earlier blocks are seen in, each of `ids` by itself: what
                decoding block by block sees, of all blocks in one evaluation of a longer row. None: they are seen in `ids`.
        """
        form, mask = self._told(attention_mask)
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
        """The evaluation of a clean canvas and, behind it in the same row, a copy with masks; both under BD3-LM's mask.

        Args:
            at: row and column (N,) of each token that is asked for.
            source: (N,) column whose output is about it.

        Returns:
            The call of the model, and where (N,) in the longer row those outputs are.
        """
        assert self.block_size is not None
        length, device = ids.shape[1], ids.device
        seen = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
        first = max(int(at[1].min()) - self.block_size + 1, 0)  # no block that is asked for begins before it
        column = torch.cat([torch.arange(length, device=device), torch.arange(first, length, device=device)])
        noisy = torch.arange(len(column), device=device) >= length
        place = positions(seen)
        block = place // self.block_size
        visible = clean_prefix(block[:, column], noisy) & seen[:, None, column]
        given: dict[str, Any] = {
            "attention_mask": self.additive(visible, len(column)),
            "position_ids": place[:, column],
        }
        if self.takes("use_cache"):
            given["use_cache"] = False
        evaluate = partial(self.model, torch.cat([clean, ids[:, first:]], dim=1), **given)
        finished = block[at[0], source] < block[at]  # the output before a block is of a finished one
        return evaluate, torch.where(finished, source, length + source - first)

    def _at_by_length(self, ids: Tensor, mask: Tensor, where: Tensor, clean: Tensor | None) -> Tensor:
        """`logits_at` of rows with as much padding at a time, without it."""
        number = where.flatten().cumsum(0).view_as(where) - 1  # of each token that is asked for
        parts, order = [], []
        for width, own in _equally_padded(mask, where.any(1)):
            known = None if clean is None else clean[own, width:]
            parts.append(self.logits_at(ids[own, width:], None, where[own, width:], known))
            order.append(number[own][where[own]])
        return torch.cat(parts)[torch.cat(order).argsort()]

    @contextmanager
    def _head_sees(self, choose: Callable[[Tensor], Tensor]) -> Iterator[None]:
        """Let the head see what is chosen of the hidden states (B, T, H), (1 or B, N, H), in their place."""
        head = self.head()
        assert head is not None  # as `selects` says
        chosen = head.register_forward_pre_hook(
            lambda _, given: None if stands_in() else (choose(given[0]), *given[1:])
        )
        try:
            yield
        finally:
            chosen.remove()

    def head(self) -> torch.nn.Module | None:
        """The layer that makes logits of hidden states, as it is now: adapters may have come around it."""
        found = getattr(self.model, "get_output_embeddings", None)
        return found() if found is not None else None

    def _told(self, attention_mask: Tensor | None) -> tuple[Form | None, Tensor | None]:
        """In which form the model is told of padding, None if it cannot be; and the mask, None if there is none."""
        if attention_mask is None or attention_mask.all():
            return self.form, None
        return self.padded_form, attention_mask.bool()

    def guided(
        self,
        ids: Tensor,
        attention_mask: Tensor | None,
        scale: float | Tensor,
        *,
        prompt: int,
        start: int = 0,
        stop: int | None = None,
    ) -> Tensor:
        """Logits like `logits` under classifier-free guidance, u + (scale + 1)(c - u), where u sees a masked prompt.

        The guidance of LLaDA's code (arXiv 2502.09992). Two evaluations a row.

        Args:
            scale: a number or (B,); 0 for none.
            prompt: number of first columns that u does not see.
        """
        blind = ids.clone()
        blind[:, :prompt] = self.mask_id
        twice = None if attention_mask is None else torch.cat([attention_mask, attention_mask])
        c, u = self.logits(torch.cat([ids, blind]), twice, start, stop).chunk(2)
        factor = torch.as_tensor(scale, dtype=c.dtype, device=c.device).reshape(-1, 1, 1) + 1
        return self.finished(u + factor * (c - u))  # -inf - -inf is mended here

    def forward(self, form: Form, ids: Tensor, mask: Tensor | None, **wanted: Any) -> Any:
        """What the model returns for a whole canvas, told what it may see in some form.

        Args:
            mask: (B, T) bool, False at padding; None if there is none.
            wanted: further arguments of its forward.
        """
        given = dict(wanted)
        if form.attention == "4d":
            seen = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
            given["attention_mask"] = self.additive(self.visible(seen), ids.shape[1])
        elif form.attention == "2d":
            given["attention_mask"] = torch.ones_like(ids) if mask is None else mask.long()
        if form.positions and mask is not None:
            given["position_ids"] = positions(mask)
        if self.takes("use_cache"):
            given.setdefault("use_cache", False)
        return self.model(ids, **given)

    def takes(self, argument: str) -> bool:
        """Whether the model's forward has an argument of this name."""
        return self._takes_all or argument in self._takes

    @property
    def cache_argument(self) -> str:
        """What the model's forward calls the cache that it is given; transformers renamed it in 5.24."""
        return "cache" if "cache" in self._takes else "past_key_values"

    def visible(self, seen: Tensor, first: int = 0) -> Tensor:
        """Which columns (B, Q, T) bool those from `first` on see, of the ones that are not padding (B, T) bool.

        (B, 1, T) where all see the same.
        """
        if self.block_size is None:
            return seen[:, None, :]
        block = positions(seen) // self.block_size
        return block_causal(block[:, first:], block) & seen[:, None, :]

    def additive(self, visible: Tensor, queries: int) -> Tensor:
        """The attention mask (B, 1, queries, K) that is added to scores, of keys that are visible (B, Q or 1, K) bool."""
        dtype = getattr(self.model, "dtype", self._parameter().dtype)
        mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
        return mask.masked_fill(~visible, torch.finfo(dtype).min)[:, None].expand(-1, -1, queries, -1)

    def aligned(self, out: Tensor, mask: Tensor | None, start: int = 0, stop: int | None = None) -> Tensor:
        """Outputs (B, stop - start, ...) such that row i is about token i; the first token of a row has its own output."""
        stop = out.shape[1] if stop is None else stop
        if not self.shift:
            return out[:, start:stop]
        first = 0 if mask is None else mask.int().argmax(1, keepdim=True)  # (B, 1), first column that is not padding
        source = (torch.arange(start, stop, device=out.device) - 1).expand(len(out), -1).clamp(min=first)
        return out[torch.arange(len(out), device=out.device)[:, None], source]

    def finished(self, logits: Tensor) -> Tensor:
        """Logits in float32 or finer, with -inf for the mask token."""
        return self._without_mask_token(logits, torch.promote_types(logits.dtype, torch.float32))

    def _without_mask_token(self, logits: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        logits = logits.to(dtype or logits.dtype, copy=True)
        logits[..., self.mask_id] = -torch.inf  # by `index_fill` the index would first wait for an accelerator
        return logits

    @property
    def hidden_size(self) -> int | None:
        """Width of the model's hidden states, as its config has it; None where it does not say."""
        config = getattr(self.model, "config", None)
        return getattr(config, "hidden_size", getattr(config, "d_model", None))

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self._parameter().device

    def _parameter(self) -> Tensor:
        """Any parameter of the model; an empty tensor for a function."""
        return next(iter(getattr(self.model, "parameters", tuple)()), torch.empty(0))


def _equally_padded(mask: Tensor, chosen: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Each number of padded columns among the chosen rows (B,) bool, and which of these rows (int64) have it."""
    padding = (~mask).sum(1)  # (B,)
    for width in padding[chosen].unique().tolist():
        yield width, ((padding == width) & chosen).nonzero()[:, 0]
