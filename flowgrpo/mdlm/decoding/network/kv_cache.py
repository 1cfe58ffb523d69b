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
Layers = list[tuple[Tensor, Tensor]]  # keys and values of each
Told = tuple[Tensor, Tensor, slice]

NOTHING: Told = (torch.empty(0), torch.empty(0), slice(0))


def cached(predictor: MaskPredictor, kind: Literal["prefix", "dual"], place: str) -> Cache:
    """The cache of a decode.

    Args:
        place: the dotted key where the decoder was written, for errors.

    Raises:
        InputError: the model takes no 4-d attention mask, no positions, or no cache.
    """
    place = f"{place}.cache"
    if predictor.form.attention != "4d" or not all(map(predictor.takes, ("position_ids", predictor.cache_argument))):
        raise InputError(f"{place}: the model takes no 4-d attention mask, position_ids or past_key_values")
    return PrefixCache(predictor, place) if predictor.block_size is not None else BlockCache(predictor, kind, place)


class Cache(ABC):
    """The keys and values that were kept of some columns of some rows, and the model, fed with the others."""

    def __init__(self, predictor: MaskPredictor, place: str):
        """Take nothing in yet."""
        self.predictor, self.place = predictor, place
        self._start: int | None = None
        self._rows: Tensor | None = None
        self._layers: Layers = []
        self._some: tuple[Tensor, Layers] = (torch.empty(0), [])  # those of these rows that are not full yet
        self._cache = DynamicCache()  # that was kept of, for the model to fill up again

    @abstractmethod
    def logits(self, ids: Tensor, attention_mask: Tensor, row: Tensor, *, start: int, stop: int) -> Tensor:
        """Logits (R, stop - start, V), like those of `MaskPredictor.logits`.

        Args:
            ids: (R, T); of a block-causal model all columns of earlier blocks than that of `start` have their token.
            attention_mask: (R, T) bool, False at padding, on the left; a row's never changes.
            row: (R,) ascending names of the rows; from step to step of the same `start` they only become fewer.
            start: first column that is returned, which tells the block.
            stop: column after the last one.

        Raises:
            InputError: the model keeps keys and values in another way than one tensor a layer, or changes with padding.
        """

    def _fed(
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
        """Logits (R, stop - start, V) of some of the fed columns.

        Args:
            ids, mask, position_ids: (R, F) of the fed columns.
            row: (R,) names of the rows.
            visible: which of the kept and fed columns are seen, as `MaskPredictor.additive` returns it.
            start: first of the fed columns that is returned.
            stop: column after the last one.
            keeps: gives those columns of keys or values (R, H, K, D) of the kept and fed ones that are kept from here on, in
                the place of those before; None for these.

        Raises:
            InputError: the model does not hold keys and values of all columns.
        """
        cache = self._kept(row)
        self.predictor.evaluations += len(ids)
        evaluate = partial(
            self.predictor.model,
            ids,
            attention_mask=visible,
            position_ids=position_ids,
            use_cache=True,
            **{self.predictor.cache_argument: cache},
        )
        logits = self.predictor.columns(evaluate, ids, mask, start=start, stop=stop)[0]
        if keeps is not None:
            self._keep(cache, row, keeps, visible.shape[-1])
        self._rewind()
        return logits

    def _kept(self, row: Tensor) -> DynamicCache:
        """A cache that has what is kept of some rows; no copy of it, unless they have become fewer."""
        if not self._some[1]:
            return DynamicCache()
        if len(row) < len(self._some[0]):
            index = torch.searchsorted(self._some[0], row)
            self._some = row, [(keys[index], values[index]) for keys, values in self._some[1]]
            self._rewind()
        return self._cache

    def _rewind(self) -> None:
        """Let the cache hold what is kept and nothing else, for a new one takes longer than a layer of a small model."""
        for layer, (keys, values) in zip(self._cache.layers, self._some[1], strict=True):
            layer.keys, layer.values = keys, values

    def _keep(self, cache: DynamicCache, row: Tensor, columns: Callable[[Tensor], Tensor], length: int) -> None:
        layers = [layer for layer in cache.layers if type(layer) is DynamicLayer and layer.get_seq_length() == length]
        if not layers or len(layers) < len(cache.layers):
            raise InputError(f"{self.place}: the model does not keep the keys and values of all its columns")
        self._layers = [(columns(layer.keys), columns(layer.values)) for layer in layers]
        self._rows, self._some, self._cache = row, (row, self._layers), cache

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
        self.kind, self._told = kind, NOTHING
        self._named: Tensor | None = None  # rows
        self._position = self._seen = torch.empty(0)  # their positions, and what their columns see
        self._padded = 0  # columns, of the row with most padding

    @override
    def logits(self, ids: Tensor, attention_mask: Tensor, row: Tensor, *, start: int, stop: int) -> Tensor:
        """Logits (R, stop - start, V) of a block; arguments and errors as of `Cache.logits`."""
        self._check_padding(attention_mask)
        if start != self._start:
            self._start, self._rows, self._layers = start, None, []
            self._some, self._told, self._cache = (torch.empty(0), []), NOTHING, DynamicCache()
        entered = self._rows is None
        first = max(start - self.predictor.shift, 0)
        last = ids.shape[1] if self.kind == "prefix" else stop
        if len(self._told[0]) != len(row):
            self._tell_rows(row, attention_mask)
            self._told = self._tell(attention_mask, first, last, entered=entered)
        place, visible, fed = self._told
        if entered:
            self._told = NOTHING
        return self._fed(
            ids[:, fed],
            attention_mask[:, fed],
            row,
            visible=visible,
            position_ids=place,
            start=start - fed.start,
            stop=stop - fed.start,
            keeps=partial(_without, first=first, last=last) if entered else None,
        )

    def _tell(self, attention_mask: Tensor, first: int, last: int, *, entered: bool) -> Told:
        """Positions (R, F) of the fed columns, what they see, and which columns they are: all, or from first to last."""
        fed = slice(0, attention_mask.shape[1]) if entered else slice(first, last)
        queries = fed.stop - fed.start
        if entered or first >= self._padded:  # no column that changes its place is padding
            return self._position[:, fed], self._seen.expand(-1, -1, queries, -1), fed
        seen = torch.cat([attention_mask[:, :first], attention_mask[:, last:], attention_mask[:, first:last]], dim=1)
        return self._position[:, fed], self.predictor.additive(seen[:, None], queries), fed

    def _tell_rows(self, row: Tensor, attention_mask: Tensor) -> None:
        """What stays from block to block, as long as the same rows have masks."""
        if self._named is None or not torch.equal(row, self._named):
            self._named, self._position = row, positions(attention_mask)
            self._seen = self.predictor.additive(attention_mask[:, None], 1)
            self._padded = int((~attention_mask).sum(1).max())


def _without(tensor: Tensor, *, first: int, last: int) -> Tensor:
    """Keys or values (R, H, K, D) without some columns; a copy, so that these take no memory."""
    return torch.cat([tensor[:, :, :first], tensor[:, :, last:]], dim=2)


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
            # A row has come back that had nothing to fill.
            self._columns, self._rows, self._layers, self._cache = 0, None, [], DynamicCache()
        if entered:
            self._some = torch.empty(0) if self._rows is None else self._rows, self._layers
            self._rewind()
        first, last = self._columns, self.predictor.block_end(ids, attention_mask, stop)
        ids, mask = ids[:, :last], attention_mask[:, :last]
        visible = self.predictor.additive(self.predictor.visible(mask, first), last - first)
        if entered:
            self._columns = max(self.predictor.block_start(mask, start) - self.predictor.shift, 0)
        return self._fed(
            ids[:, first:],
            mask[:, first:],
            row,
            visible=visible,
            position_ids=positions(mask)[:, first:],
            start=start - first,
            stop=stop - first,
            keeps=partial(torch.narrow, dim=2, start=0, length=self._columns) if entered else None,
        )
