"""Keys and values kept while a completion is filled: an approximation within a block, or exact from block to block.

In a bidirectional model they age with every token. Fast-dLLM (arXiv 2505.22618): the first step of a block runs the whole
canvas; the following ones feed only the columns from the block on (`prefix`), or only the block (`dual`), beside the keys
and values that the first step left of the others. Of a model with one layer of attention that is exact, because no other
column changes meanwhile.

A kept key knows its position and the order of keys is nothing to attention, so both are one thing: the fed columns go after
the kept ones.

In a block-causal model a finished block never changes: what is kept of it is exact, for the whole decode.
"""

from __future__ import annotations

from typing import Literal

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from flowgrpo.errors import InputError
from flowgrpo.mdlm.decoding.attention import positions
from flowgrpo.mdlm.decoding.predictor import MaskPredictor

Tensor = torch.Tensor


def cached(predictor: MaskPredictor, kind: Literal["prefix", "dual"]) -> BlockCache | PrefixCache:
    """The cache of a decode.

    Raises:
        InputError: the model takes no 4-d attention mask, no positions, or no cache.
    """
    if predictor.form.attention != "4d" or not all(map(predictor.takes, ("position_ids", "past_key_values"))):
        raise InputError("decoder.cache: the model takes no 4-d attention mask, position_ids or past_key_values")
    return BlockCache(predictor, kind) if predictor.block_size is None else PrefixCache(predictor)


class BlockCache:
    """Logits of blocks, each from the whole canvas at its first step and from few columns after it."""

    def __init__(self, predictor: MaskPredictor, kind: Literal["prefix", "dual"]):
        """Take nothing in yet."""
        self.predictor, self.kind = predictor, kind
        self._start: int | None = None
        self._rows: Tensor | None = None
        self._kept: list[tuple[Tensor, Tensor]] = []

    def logits(self, ids: Tensor, attention_mask: Tensor, row: Tensor, *, start: int, stop: int) -> Tensor:
        """Logits (R, stop - start, V) of a block, like those of `MaskPredictor.logits`.

        Args:
            ids: (R, T).
            attention_mask: (R, T) bool.
            row: (R,) ascending names of the rows; those that come at a later step of a block came at its first.
            start: first column of the block.
            stop: column after its last.

        Raises:
            InputError: the model keeps keys and values in another way than one tensor a layer, or changes with padding.
        """
        _check_padding(self.predictor, attention_mask)
        if start != self._start:
            self._start, self._rows, self._kept = start, None, []
        first = max(start - self.predictor.shift, 0)
        last = ids.shape[1] if self.kind == "prefix" else stop
        columns = torch.arange(ids.shape[1], device=ids.device)
        fed = columns if self._rows is None else columns[first:last]
        kept = columns[:0] if self._rows is None else torch.cat([columns[:first], columns[last:]])
        cache = _restored(self._kept, self._rows, row)
        self.predictor.evaluations += len(ids)
        out = self.predictor.model(
            ids[:, fed],
            attention_mask=self.predictor.additive(attention_mask[:, None, torch.cat([kept, fed])], len(fed)),
            position_ids=positions(attention_mask)[:, fed],
            past_key_values=cache,
            use_cache=True,
        )
        if self._rows is None:
            self._keep(cache, row, torch.cat([columns[:first], columns[last:]]), ids.shape[1])
        begins = start - int(fed[0])
        block = self.predictor.aligned(out.logits, attention_mask[:, fed], begins, begins + stop - start)
        return self.predictor.finished(block)

    def _keep(self, cache: DynamicCache, row: Tensor, columns: Tensor, length: int) -> None:
        whole = _layers(cache, length)
        self._rows, self._kept = row, [(layer.keys[:, :, columns], layer.values[:, :, columns]) for layer in whole]


class PrefixCache:
    """Logits of the blocks of a block-causal model, one after the other, from the columns after the finished blocks.

    The first step of a block feeds the one before it once more, now that it is finished, and keeps it.
    """

    def __init__(self, predictor: MaskPredictor):
        """Take nothing in yet."""
        self.predictor = predictor
        self._start: int | None = None
        self._rows, self._columns = torch.empty(0, dtype=torch.long, device=predictor.device), 0
        self._kept: list[tuple[Tensor, Tensor]] = []

    def logits(self, ids: Tensor, attention_mask: Tensor, row: Tensor, *, start: int, stop: int) -> Tensor:
        """Logits (R, stop - start, V), like those of `MaskPredictor.logits`.

        Args:
            ids: (R, T); all columns of earlier blocks than that of `start` have their token.
            attention_mask: (R, T) bool.
            row: (R,) ascending names of the rows; those that come at a later step of the same `start` came at the first.
            start: first column that is returned.
            stop: column after the last one.

        Raises:
            InputError: the model keeps keys and values in another way than one tensor a layer, or changes with padding.
        """
        _check_padding(self.predictor, attention_mask)
        entered, self._start = start != self._start, start
        if entered and not torch.isin(row, self._rows).all():
            self._columns, self._kept = 0, []  # a row has come back that had nothing to fill for a while
        first, last = self._columns, self.predictor.block_end(ids, attention_mask, stop)
        ids, mask = ids[:, :last], attention_mask[:, :last]
        cache = _restored(self._kept if first > 0 else [], self._rows, row)
        self.predictor.evaluations += len(ids)
        out = self.predictor.model(
            ids[:, first:],
            attention_mask=self.predictor.additive(self.predictor.visible(mask, first), last - first),
            position_ids=positions(mask)[:, first:],
            past_key_values=cache,
            use_cache=True,
        )
        if entered:
            done = max(self.predictor.block_start(mask, start) - self.predictor.shift, 0)
            self._rows, self._columns = row, done
            self._kept = [(layer.keys[:, :, :done], layer.values[:, :, :done]) for layer in _layers(cache, last)]
        return self.predictor.finished(self.predictor.aligned(out.logits, mask[:, first:], start - first, stop - first))


def _restored(kept: list[tuple[Tensor, Tensor]], names: Tensor | None, row: Tensor) -> DynamicCache:
    """A cache of the keys and values of each layer that were kept of rows with such names, for some of the rows."""
    cache = DynamicCache()
    for layer, (keys, values) in enumerate(kept):
        at = torch.searchsorted(names, row)
        cache.update(keys[at], values[at], layer)
    return cache


def _check_padding(predictor: MaskPredictor, attention_mask: Tensor) -> None:
    if predictor.padded_form is None and not attention_mask.all():
        raise InputError(
            "decoder.cache: the model's logits change with padding, and prompts differ in length; take null"
        )


def _layers(cache: DynamicCache, length: int) -> list[DynamicLayer]:
    """The layers that hold keys and values of so many columns.

    Raises:
        InputError: not all do.
    """
    whole = [layer for layer in cache.layers if type(layer) is DynamicLayer and layer.get_seq_length() == length]
    if not whole or len(whole) < len(cache.layers):
        raise InputError("decoder.cache: the model does not keep the keys and values of all its columns")
    return whole
