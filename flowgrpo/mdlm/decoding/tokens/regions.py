"""Regions: the blocks of a completion in their order, and a window within them.

Blocks of a block-causal model, or equal parts of them, are counted from the first token of the prompt. So their
positions differ between rows: an answer begins with the rest of the prompt's last block.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Literal

from typing_extensions import override

from flowgrpo.errors import InputError
from flowgrpo.schema.base import Choice, Count
from flowgrpo.schema.imports.heavy import Tensor, torch


@dataclass(frozen=True)
class Region:
    """Blocks that are filled one after the other."""

    ends: tuple[int, ...]  # position after the last of each block; the last is the length of the completion
    window: int | None = None  # number of open positions from a row's first mask on; None for the whole block
    # Tokens of a block, if blocks are counted from the prompt's first token; `ends` then hold for prompts of whole blocks.
    # None if the first block begins with the completion.
    counted: int | None = None
    block_size: int | None = None  # tokens of a block of a block-causal model; a multiple of `counted`

    @property
    def length(self) -> int:
        """Tokens of the completion."""
        return self.ends[-1]

    @property
    def blocks(self) -> list[tuple[int, int]]:
        """Start and end of each block."""
        return list(zip((0, *self.ends[:-1]), self.ends, strict=True))

    @property
    def narrow(self) -> bool:
        """Return whether the window is smaller than some block."""
        return self.window is not None and any(end - start > self.window for start, end in self.blocks)

    def parts(self, prompt: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return start and end (B,) of each block, equal if a row lacks it; `prompt` (B,) is each prompt's length."""
        if self.counted is None:
            return [(torch.full_like(prompt, start), torch.full_like(prompt, end)) for start, end in self.blocks]
        before = prompt % self.counted
        borders = [
            (number * self.counted - before).clamp(0, self.length)
            for number in range(-(-(int(before.max()) + self.length) // self.counted) + 1)
        ]
        return list(pairwise(borders))

    def open(self, masked: Tensor) -> Tensor:
        """Return which masked positions (R, W) of a block may be committed."""
        if self.window is None:
            return masked
        index = torch.arange(masked.shape[1], device=masked.device)
        return masked & (index < masked.int().argmax(1, keepdim=True) + self.window)


def even(
    length: int, block_length: int | None = None, window: int | None = None, place: str = "decoder.region"
) -> Region:
    """Return blocks of equal length, by default one block; raise InputError if `block_length` does not divide `length`."""
    block_length = length if block_length is None else block_length
    if length % block_length:
        raise InputError(f"{place}.block_length: {block_length} does not divide the length {length}")
    return Region(tuple(range(block_length, length + 1, block_length)), window)


class Layout(Choice):
    """The config section that lays a completion out in blocks."""

    @abstractmethod
    def region(self, length: int, place: str) -> Region:
        """Return the region of completions of `length` tokens; raise InputError, naming `place`, if blocks do not fit."""


class Blocks(Layout):
    """Blocks of one length, filled one after the other."""

    name: Literal["blocks"] = "blocks"
    block_length: Count | None = None
    """Tokens of a block; null: one block, or the blocks of a block-causal model."""
    window: Count | None = None
    """Number of positions, from a row's first mask on, that may be committed; null: the whole block."""

    @override
    def region(self, length: int, place: str) -> Region:
        return even(length, self.block_length, self.window, place)


def ascending_sizes(length: int, blocks: int = 1, place: str = "decoder.region") -> tuple[tuple[int, ...], ...]:
    """Return the tokens of each step, by block: 1, 2, 4, ... in floor(log2 length) steps; the last step takes the rest.

    ASS (arXiv 2509.23924 and its code). The first block takes several steps, every later block one. Raises InputError for
    more blocks than steps.
    """
    steps = max(length.bit_length() - 1, 1)
    sizes = [2**i for i in range(steps - 1)]
    sizes.append(length - sum(sizes))
    if not 1 <= blocks <= steps:
        raise InputError(f"{place}.blocks: {blocks} is not between 1 and {steps}, the steps for length {length}")
    first = steps - blocks + 1
    return (tuple(sizes[:first]), *((size,) for size in sizes[first:]))


def ascending(length: int, blocks: int = 1, place: str = "decoder.region") -> Region:
    """Return the blocks of steps of ascending size; see `ascending_sizes`."""
    return Region(tuple(accumulate(map(sum, ascending_sizes(length, blocks, place)))))


class AscendingBlocks(Layout):
    """The blocks that steps of ascending size fill (ASS)."""

    name: Literal["ascending"] = "ascending"
    blocks: int = 1
    """Number of blocks; all but the first take one step each."""

    @override
    def region(self, length: int, place: str) -> Region:
        return ascending(length, self.blocks, place)


def fit_blocks(region: Region, block_size: int, place: str) -> Region:
    """Return a region whose blocks are counted from the prompt: a block-causal model's own blocks, or equal parts of them.

    A region of one block, or of blocks that span several of the model's, becomes the model's own blocks. Raises InputError
    if the blocks are not equal parts of the model's.
    """
    size = block_size if len(region.ends) == 1 or region.ends[0] % block_size == 0 else region.ends[0]
    if block_size % size:
        raise InputError(
            f"{place}: blocks of {size} tokens are not equal parts of the model's, which have {block_size}"
        )
    ends = (*range(size, region.length, size), region.length)
    return replace(region, ends=ends, counted=size, block_size=block_size)
