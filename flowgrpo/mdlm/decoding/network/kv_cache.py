"""Key-value caches of a decode: approximate in bidirectional models, exact in block-causal ones.

In a bidirectional model cached keys and values become stale with every committed token. Fast-dLLM (arXiv 2505.22618): the
first step of a block runs the whole canvas; the later steps feed only the columns from the block on (`prefix`), or only the
block (`dual`), and reuse the keys and values of the others. This is exact for a model with one attention layer.

In a block-causal model a finished block never changes, so its keys and values are exact for the whole decode, and for all
branches of a tree that go on from it.

Cached keys carry their positions and attention ignores the order of keys, so fed columns simply follow the cached ones.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer
from typing_extensions import override

from flowgrpo.errors import InputError
from flowgrpo.mdlm.decoding.network.block_attention import positions
from flowgrpo.mdlm.decoding.network.predictor import MaskPredictor

Tensor = torch.Tensor
Kept = tuple[Tensor, list[tuple[Tensor, Tensor]]]  # numbers of the rows; keys and values of each layer

NOTHING: Kept = (torch.empty(0), [])


def build_cache(predictor: MaskPredictor, kind: Literal["prefix", "dual"], place: str) -> Cache:
    """Build the cache of a decode; raise InputError if the model takes no 4-d attention mask, positions or cache."""
    place = f"{place}.cache"
    if predictor.form.attention != "4d" or not all(map(predictor.takes, ("position_ids", predictor.cache_argument))):
        raise InputError(f"{place}: the model takes no 4-d attention mask, position_ids or past_key_values")
    return PrefixCache(predictor, place) if predictor.block_size is not None else BlockCache(predictor, kind, place)


class Cache(ABC):
    """The cached keys and values of some columns, and the model, which is fed the other columns."""

    def __init__(self, predictor: MaskPredictor, place: str):
        self.predictor, self.place = predictor, place
        self._start: int | None = None
        self._kept = NOTHING  # of all rows that were unfinished at the first step of the current block
        self._live = NOTHING  # of the rows that are unfinished now
        self._cache = DynamicCache()  # the model appends to it; `_rewind` removes the appended columns

    @abstractmethod
    def logits(self, ids: Tensor, attention_mask: Tensor, row: Tensor, *, start: int, stop: int) -> Tensor:
        """Return logits (R, stop - start, V), like those of `MaskPredictor.logits`.

        Args:
            ids: (R, T); in a block-causal model all blocks before that of `start` are finished.
            attention_mask: (R, T) bool, False at padding, on the left; constant per row.
            row: (R,) ascending numbers of the rows; later calls for the same block have a subset of them.
            start: first column to return; it identifies the block.

        Raises:
            InputError: the model does not cache one tensor of keys and values per layer, or its logits change with padding.
        """

    @abstractmethod
    def branch(self) -> Cache:
        """Return a cache that begins a block with what stays exact of this one, which stays as it is."""

    def repeat(self, index: Tensor, row: Tensor) -> None:
        """Give rows (R,) ascending copies of what is cached of the rows of the last call, by their places `index` (R,)."""
        self._kept = self._live = row, [(keys[index], values[index]) for keys, values in self._live[1]]
        self._rewind()

    def _evaluate(
        self,
        ids: Tensor,
        mask: Tensor,
        row: Tensor,
        *,
        visible: Tensor,
        position_ids: Tensor,
        start: int,
        stop: int,
        keeps: Callable[[Tensor], Tensor] | None,
    ) -> Tensor:
        """Return logits (R, stop - start, V) of fed columns.

        Args:
            ids, mask, position_ids: (R, F) of the fed columns.
            visible: which cached and fed columns are seen, from `MaskPredictor.additive`.
            start, stop: range of the returned columns, counted among the fed ones.
            keeps: returns, from the keys or values (R, H, K, D) of cached and fed columns, those to cache from now on. None
                leaves the cache as it was.
        """
        rows, layers = self._live
        if len(row) < len(rows):
            index = torch.searchsorted(rows, row)
            self._live = row, [(keys[index], values[index]) for keys, values in layers]
            self._rewind()
        self.predictor.evaluations += len(ids)
        evaluate = partial(
            self.predictor.model,
            ids,
            attention_mask=visible,
            position_ids=position_ids,
            use_cache=True,
            **{self.predictor.cache_argument: self._cache},
        )
        logits = self.predictor.columns(evaluate, ids, mask, start=start, stop=stop)[0]
        if keeps is not None:
            self._keep(row, keeps, visible.shape[-1])
        self._rewind()
        return logits

    def _rewind(self) -> None:
        """Reset the cache to the keys and values of `_live`; a new cache would take longer than a layer of a small model."""
        for layer, (keys, values) in zip(self._cache.layers, self._live[1], strict=True):
            layer.keys, layer.values = keys, values

    def _keep(self, row: Tensor, columns: Callable[[Tensor], Tensor], length: int) -> None:
        layers = self._cache.layers
        if not layers or any(type(layer) is not DynamicLayer or layer.get_seq_length() != length for layer in layers):
            raise InputError(f"{self.place}: the model does not keep the keys and values of all its columns")
        self._kept = self._live = row, [(columns(layer.keys), columns(layer.values)) for layer in layers]

    def _check_padding(self, attention_mask: Tensor) -> None:
        if self.predictor.padded_form is None and not attention_mask.all():
            raise InputError(
                f"{self.place}: the model's logits change with padding, and prompts differ in length; take null"
            )


class BlockCache(Cache):
    """Cache of a bidirectional model: the first step of a block runs the whole canvas, later steps only a part of it."""

    def __init__(self, predictor: MaskPredictor, kind: Literal["prefix", "dual"], place: str):
        super().__init__(predictor, place)
        self.kind = kind

    @override
    def branch(self) -> Cache:
        return BlockCache(self.predictor, self.kind, self.place)

    @override
    def logits(self, ids: Tensor, attention_mask: Tensor, row: Tensor, *, start: int, stop: int) -> Tensor:
        self._check_padding(attention_mask)
        entered, self._start = start != self._start, start
        first = max(start - self.predictor.shift, 0)
        last = ids.shape[1] if self.kind == "prefix" else stop
        if entered:
            self._live, self._cache = NOTHING, DynamicCache()
            fed, seen = slice(0, ids.shape[1]), attention_mask
        else:
            fed = slice(first, last)
            seen = torch.cat([_without(attention_mask, first=first, last=last), attention_mask[:, fed]], dim=1)
        return self._evaluate(
            ids[:, fed],
            attention_mask[:, fed],
            row,
            visible=self.predictor.additive(seen[:, None], fed.stop - fed.start),
            position_ids=positions(attention_mask)[:, fed],
            start=start - fed.start,
            stop=stop - fed.start,
            keeps=partial(_without, first=first, last=last, dim=2) if entered else None,
        )


def _without(tensor: Tensor, *, first: int, last: int, dim: int = 1) -> Tensor:
    """Return a copy without the columns from `first` to `last` (excluded), which then take no memory."""
    after = tensor.shape[dim] - last
    return torch.cat([tensor.narrow(dim, 0, first), tensor.narrow(dim, last, after)], dim=dim)


class PrefixCache(Cache):
    """Cache of a block-causal model: the keys and values of its finished blocks.

    The first step of a block also runs the previous block, which is finished by then, and caches it.
    """

    def __init__(self, predictor: MaskPredictor, place: str):
        super().__init__(predictor, place)
        self._columns = 0

    @override
    def branch(self) -> Cache:
        begun = PrefixCache(self.predictor, self.place)
        begun._columns, begun._kept, begun._live = self._columns, self._kept, self._kept
        for number, (keys, values) in enumerate(self._kept[1]):
            begun._cache.update(keys, values, number)  # adds a layer
        begun._rewind()
        return begun

    @override
    def logits(self, ids: Tensor, attention_mask: Tensor, row: Tensor, *, start: int, stop: int) -> Tensor:
        self._check_padding(attention_mask)
        entered, self._start = start != self._start, start
        if entered:
            if not (self._kept[1] and torch.isin(row, self._kept[0]).all()):
                # A row has returned that had no masks in the last block, so it is not cached: start anew.
                self._columns, self._kept, self._cache = 0, NOTHING, DynamicCache()
            self._live = self._kept
            self._rewind()
        first, last = self._columns, self.predictor.block_end(ids, attention_mask, stop)
        ids, mask = ids[:, :last], attention_mask[:, :last]
        visible = self.predictor.additive(self.predictor.visible(mask, first), last - first)
        if entered:
            self._columns = max(self.predictor.block_start(mask, start) - self.predictor.shift, 0)
        return self._evaluate(
            ids[:, first:],
            mask[:, first:],
            row,
            visible=visible,
            position_ids=positions(mask)[:, first:],
            start=start - first,
            stop=stop - first,
            keeps=partial(torch.narrow, dim=2, start=0, length=self._columns) if entered else None,
        )
