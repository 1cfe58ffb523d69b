"""Keys and values kept within a block: an approximation, since in a bidirectional model they age with every token.

Fast-dLLM (arXiv 2505.22618): the first step of a block runs the whole canvas; the following ones feed only the columns from
the block on (`prefix`), or only the block (`dual`), beside the keys and values that the first step left of the others. Of a
model with one layer of attention that is exact, because no other column changes meanwhile.

A kept key knows its position and the order of keys is nothing to attention, so both are one thing: the fed columns go after
the kept ones.
"""

from __future__ import annotations

from typing import Literal

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from flowgrpo.errors import InputError
from flowgrpo.mdlm.predictor import MaskPredictor, positions

Tensor = torch.Tensor


class BlockCache:
    """Logits of one block, from the whole canvas at its first step and from few columns after it."""

    def __init__(self, predictor: MaskPredictor, kind: Literal["prefix", "dual"], start: int, end: int):
        """Take nothing in yet.

        Args:
            start: first column of the block.
            end: column after its last.

        Raises:
            InputError: the model takes no 4-d attention mask, no positions, or no cache.
        """
        if predictor.form.attention != "4d" or not all(map(predictor.takes, ("position_ids", "past_key_values"))):
            raise InputError("decoder.cache: the model takes no 4-d attention mask, position_ids or past_key_values")
        self.predictor, self.kind, self.start, self.end = predictor, kind, start, end
        self._rows: Tensor | None = None
        self._kept: list[tuple[Tensor, Tensor]] = []

    def logits(self, ids: Tensor, attention_mask: Tensor, row: Tensor) -> Tensor:
        """Logits (R, end - start, V) of the block, like those of `MaskPredictor.logits`.

        Args:
            ids: (R, T).
            attention_mask: (R, T) bool.
            row: (R,) ascending names of the rows; all that ever come are there the first time.

        Raises:
            InputError: the model keeps keys and values in another way than one tensor a layer, or changes with padding.
        """
        if self.predictor.padded_form is None and not attention_mask.all():
            raise InputError(
                "decoder.cache: the model's logits change with padding, and prompts differ in length; take null"
            )
        first = max(self.start - 1, 0) if self.predictor.shift else self.start
        last = ids.shape[1] if self.kind == "prefix" else self.end
        columns = torch.arange(ids.shape[1], device=ids.device)
        fed = columns if self._rows is None else columns[first:last]
        kept = columns[:0] if self._rows is None else torch.cat([columns[:first], columns[last:]])
        cache = DynamicCache()
        if self._rows is not None:
            at = torch.searchsorted(self._rows, row)
            for layer, (keys, values) in enumerate(self._kept):
                cache.update(keys[at], values[at], layer)
        self.predictor.evaluations += len(ids)
        out = self.predictor.model(
            ids[:, fed],
            attention_mask=self.predictor.four_d(attention_mask[:, torch.cat([kept, fed])], len(fed)),
            position_ids=positions(attention_mask)[:, fed],
            past_key_values=cache,
            use_cache=True,
        )
        if self._rows is None:
            self._keep(cache, row, torch.cat([columns[:first], columns[last:]]), ids.shape[1])
        begins = self.start - int(fed[0])
        block = self.predictor.aligned(out.logits, attention_mask[:, fed], begins, begins + self.end - self.start)
        return self.predictor.finished(block)

    def _keep(self, cache: DynamicCache, row: Tensor, columns: Tensor, length: int) -> None:
        whole = [layer for layer in cache.layers if type(layer) is DynamicLayer and layer.get_seq_length() == length]
        if not whole or len(whole) < len(cache.layers):
            raise InputError("decoder.cache: the model does not keep the keys and values of all its columns")
        self._rows, self._kept = row, [(layer.keys[:, :, columns], layer.values[:, :, columns]) for layer in whole]
