"""The state of a decode at one step, as proposals, scorers, modifiers and committers see it.

R rows are unfinished, W columns form the current block, L is the length of a completion.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from flowgrpo.errors import InputError
from flowgrpo.mdlm.decoding.tokens.regions import Region
from flowgrpo.schema.base import NotNegative, Rate
from flowgrpo.schema.imports.heavy import Tensor, torch
from flowgrpo.schema.imports.lazy import lazy

if TYPE_CHECKING:
    from samplers import noise
    from samplers.noise import Address
else:
    noise = lazy("samplers.noise")

Setting = NotNegative | Callable[..., Any]  # a number, or a function from a DecodeStep to the numbers (R,) of its rows
Fraction = Rate | Callable[..., Any]  # the same, at most 1


@dataclass(frozen=True, kw_only=True)
class Frame:
    """Constants of a decode."""

    region: Region  # the blocks and their order
    steps: int  # of a whole decode; an upper bound if scores decide
    eos_id: int | None = None  # end-of-sequence token; None if the model has none
    pad_id: int | None = None  # padding token; None if the model has none, or is not loaded yet
    place: str = "decoder"  # dotted key of the decoder in the config, for errors

    @property
    def block_steps(self) -> int:
        """Steps of one block; raises InputError if the steps do not divide into the blocks."""
        blocks, size = len(self.region.ends), self.region.counted
        if size is not None:  # the length need not be a multiple of the block size
            if self.steps * size % self.region.length:
                raise InputError(
                    f"{self.place}.steps: {self.steps} for {self.region.length} tokens are not a whole number for a block "
                    f"of {size}"
                )
            return self.steps * size // self.region.length
        if self.steps % blocks:
            raise InputError(f"{self.place}.steps: {self.steps} does not divide into {blocks} blocks")
        return self.steps // blocks

    @property
    def end(self) -> int:
        """The end-of-sequence token; raises InputError if the model has none."""
        if self.eos_id is None:
            raise InputError(f"{self.place}: it looks at the end of sequence, and the model has no such token")
        return self.eos_id


@dataclass(frozen=True)
class Draws:
    """Random numbers of a decode, addressed by row, purpose, step and position.

    `seeds` holds an address for each row of the batch; `width` is the number of positions of a row.
    """

    seeds: Sequence[Address]
    width: int
    device: torch.device | str = "cpu"

    def of(self, purpose: str, row: Tensor, index: Tensor) -> Tensor:
        """Return random numbers (R, L) float64 in [0, 1) for rows (R,) of the batch, each after `index` (R,) steps."""
        numbered = zip(row.tolist(), index.tolist(), strict=True)
        return noise.uniforms([(self.seeds[number], purpose, step) for number, step in numbered], self.width).to(
            self.device
        )


@dataclass(frozen=True, kw_only=True)
class DecodeStep:
    """One step of R rows in one block."""

    frame: Frame
    row: Tensor  # (R,) indices in the batch
    index: Tensor  # (R,) steps that each row has taken so far
    in_block: int  # steps taken in this block, the same for all rows
    block_masks: Tensor  # (R,) positions that were masked when the block began
    block: int  # number of the block
    start: int  # first position of the block in the completion
    open: Tensor  # (R, W) positions of the block that may be committed now
    ids: Tensor  # (R, T) canvas, prompt and completion
    attention_mask: Tensor  # (R, T) bool, False at padding
    prompt: int  # columns of the prompt
    draws: Draws | None = None  # random numbers of the batch; None for a decode without seeds
    hidden: tuple[Tensor, ...] = ()  # the hidden states (R, T, H) that the scorer reads

    @property
    def last(self) -> bool:
        """True in the last step of its block, and after it."""
        return self.in_block >= self.frame.block_steps - 1

    @property
    def completion(self) -> Tensor:
        """Tokens (R, L), partly masked."""
        return self.ids[:, self.prompt :]

    @cached_property
    def place(self) -> tuple[Tensor, Tensor]:
        """Row (N,) in 0..R-1 and column (N,) in 0..W-1 of each open position."""
        row, column = self.open.nonzero(as_tuple=True)
        return row, column

    @cached_property
    def position(self) -> Tensor:
        """Index (N,) of each open position in the completion."""
        return self.place[1] + self.start

    @property
    def owner(self) -> Tensor:
        """Row (N,) in 0..R-1 of each open position."""
        return self.place[0]

    def of(self, rows: Tensor) -> DecodeStep:
        """Return the step of some rows, by their places (int64) in 0..R-1."""
        named = ("row", "index", "block_masks", "open", "ids", "attention_mask")
        return replace(self, **{name: getattr(self, name)[rows] for name in named})

    def uniform(self, purpose: str) -> Tensor:
        """Return a number (N,) float64 in [0, 1) per open position; raise ValueError if the decode has no seeds."""
        if self.draws is None:
            raise ValueError("this decoder draws random numbers, give it one seed for each row")
        return self.draws.of(purpose, self.row, self.index)[self.owner, self.position]


def setting(value: Setting, step: DecodeStep) -> Tensor:
    """Return the value (R,) float64 of a setting for each row of a step."""
    if callable(value):
        return value(step)
    return torch.full(step.row.shape, float(value), dtype=torch.float64, device=step.open.device)
