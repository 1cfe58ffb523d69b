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

from abc import ABC, abstractmethod
from typing import Literal

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer
from typing_extensions import override

from flowgrpo.errors import InputError
from flowgrpo.mdlm.decoding.attention import positions
from flowgrpo.mdlm.decoding.predictor import MaskPredictor

Tensor = torch.Tensor


def cached(predictor: MaskPredictor, kind: Literal["prefix", "dual"], place: str) -> Cache:
    """The cache of a decode.

    Args:
        place: the dotted key where the decoder was written, for errors.

    Raises:
        InputError: the model takes no 4-d attention mask, no positions, or no cache.
    """
    place = f"{place}.cache"
    if predictor.form.attention != "4d" or not all(map(predictor.takes, ("position_ids", "past_key_values"))):
        raise InputError(f"{place}: the model takes no 4-d attention mask, position_ids or past_key_values")
    return PrefixCache(predictor, place) if predictor.block_size is not None else BlockCache(predictor, kind, place)


class Cache(ABC):
    """The keys and values that were kept of some columns of some rows, and the model, fed with the others."""

    def __init__(self, predictor: MaskPredictor, place: str):
        """Take nothing in yet."""
        self.predictor, self.place = predictor, place
        self._start: int | None = None
        self._rows: Tensor | None = None
        self._layers: list[tuple[Tensor, Tensor]] = []

    @abstractmethod
    def logits(self, ids: Tensor, attention_mask: Tensor, row: Tensor, *, start: int, stop: int) -> Tensor:
        """Logits (R, stop - start, V), like those of `MaskPredictor.logits`.

        Args:
            ids: (R, T); of a block-causal model all columns of earlier blocks than that of `start` have their token.
            attention_mask: (R, T) bool.
            row: (R,) ascending names of the rows; those that come at a later step of the same `start` came at the first.
            start: first column that is returned, which tells the block.
            stop: column after the last one.

        Raises:
            InputError: the model keeps keys and values in another way than one tensor a layer, or changes with padding.
        """

    def _fed(self, ids: Tensor, visible: Tensor, position_ids: Tensor, row: Tensor) -> tuple[Tensor, DynamicCache]:
        """The model's output (R, F, V or H) at the fed columns, and the cache of kept and fed ones.

        Args:
            ids: (R, F).
            visible: bool, as `MaskPredictor.additive` takes it: which of the kept and fed columns are seen.
            position_ids: (R, F).
            row: (R,) names of the rows.
        """
        cache = DynamicCache()
        for layer, (keys, values) in enumerate(self._layers):
            index = torch.searchsorted(self._rows, row)
            cache.update(keys[index], values[index], layer)
        self.predictor.evaluations += len(ids)
        out = self.predictor.model(
            ids,
            attention_mask=self.predictor.additive(visible, ids.shape[1]),
            position_ids=position_ids,
            past_key_values=cache,
            use_cache=True,
        )
        return out.logits, cache

    def _keep(self, cache: DynamicCache, row: Tensor, columns: Tensor | slice, length: int) -> None:
        """Keep some columns of a cache that has so many of some rows.

        Raises:
            InputError: not all layers hold keys and values of all columns.
        """
        layers = [layer for layer in cache.layers if type(layer) is DynamicLayer and layer.get_seq_length() == length]
        if not layers or len(layers) < len(cache.layers):
            raise InputError(f"{self.place}: the model does not keep the keys and values of all its columns")
        self._rows = row
        self._layers = [(layer.keys[:, :, columns], layer.values[:, :, columns]) for layer in layers]

    def _check_padding(self, attention_mask: Tensor) -> None:
        if self.predictor.padded_form is None and not attention_mask.all():
            raise InputError(
                f"{self.place}: the model's logits change with padding, and prompts differ in length; take null"
            )


class BlockCache(Cache):
    """Logits of blocks, each from the whole canvas at its first step and from few columns after it."""

    def __init__(self, predictor: MaskPredictor, kind: Literal["prefix", "dual"], place: str):
        """Take nothing in yet."""
        super().__init__(predictor, place)
        self.kind = kind

    @override
    def logits(self, ids: Tensor, attention_mask: Tensor, row: Tensor, *, start: int, stop: int) -> Tensor:
        """Logits (R, stop - start, V) of a block; arguments and errors as of `Cache.logits`."""
        self._check_padding(attention_mask)
        if start != self._start:
            self._start, self._rows, self._layers = start, None, []
        first = max(start - self.predictor.shift, 0)
        last = ids.shape[1] if self.kind == "prefix" else stop
        columns = torch.arange(ids.shape[1], device=ids.device)
        others = torch.cat([columns[:first], columns[last:]])
        entered = self._rows is None
        fed, known = (columns, columns[:0]) if entered else (columns[first:last], others)
        visible = attention_mask[:, None, torch.cat([known, fed])]
        logits, cache = self._fed(ids[:, fed], visible, positions(attention_mask)[:, fed], row)
        if entered:
            self._keep(cache, row, others, ids.shape[1])
        begins = start - int(fed[0])
        block = self.predictor.aligned(logits, attention_mask[:, fed], begins, begins + stop - start)
        return self.predictor.finished(block)


class PrefixCache(Cache):
    """Logits of the blocks of a block-causal model, one after the other, from the columns after the finished blocks.

    The first step of a block feeds the one before it once more, now that it is finished, and keeps it.
    """

    def __init__(self, predictor: MaskPredictor, place: str):
        """Take nothing in yet."""
        super().__init__(predictor, place)
        self._columns = 0

    @override
    def logits(self, ids: Tensor, attention_mask: Tensor, row: Tensor, *, start: int, stop: int) -> Tensor:
        """Logits (R, stop - start, V); arguments and errors as of `Cache.logits`."""
        self._check_padding(attention_mask)
        entered, self._start = start != self._start, start
        if entered and not (self._rows is not None and torch.isin(row, self._rows).all()):
            self._columns, self._layers = 0, []  # a row has come back that had nothing to fill for a while
        first, last = self._columns, self.predictor.block_end(ids, attention_mask, stop)
        ids, mask = ids[:, :last], attention_mask[:, :last]
        visible = self.predictor.visible(mask, first)
        logits, cache = self._fed(ids[:, first:], visible, positions(mask)[:, first:], row)
        if entered:
            self._columns = max(self.predictor.block_start(mask, start) - self.predictor.shift, 0)
            self._keep(cache, row, slice(self._columns), last)
        return self.predictor.finished(self.predictor.aligned(logits, mask[:, first:], start - first, stop - first))
