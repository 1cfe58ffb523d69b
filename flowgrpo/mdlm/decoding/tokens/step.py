"""Where the rows of a decode stand at one step: what proposals, scorers, modifiers and committers are told.

R rows are unfinished, W columns form the block that is being filled, L is the length of a completion.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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

Setting = NotNegative | Callable[..., Any]  # a number, or of a DecodeStep one (R,) for each of its rows
Fraction = Rate | Callable[..., Any]  # the same, up to 1

AHEAD = 4  # steps whose random numbers are drawn at once: right after a call of the model the first draw costs most


@dataclass(frozen=True, kw_only=True)
class Frame:
    """What stays the same from the first step of a decode to its last.

    Attributes:
        region: the blocks that are filled, and their order.
        steps: of a whole decode, the most where scores decide how many there are.
        eos_id: end of sequence; None if the model has none.
        pad_id: padding; None if there is none, or it is not known yet.
        place: the dotted key where the decoder was written, for errors.
    """

    region: Region
    steps: int
    eos_id: int | None = None
    pad_id: int | None = None
    place: str = "decoder"

    @property
    def block_steps(self) -> int:
        """Steps of one block.

        Raises:
            InputError: the steps cannot be divided among the blocks.
        """
        blocks, size = len(self.region.ends), self.region.counted
        if size is not None:  # the length need not be whole blocks
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
        """The end of sequence.

        Raises:
            InputError: the model has none.
        """
        if self.eos_id is None:
            raise InputError(f"{self.place}: it looks at the end of sequence, and the model has no such token")
        return self.eos_id


class Draws:
    """The random numbers of a decode, addressed by row, purpose, step and position, and drawn some steps ahead."""

    def __init__(self, seeds: Sequence[Address], width: int, device: torch.device | str = "cpu"):
        """Draw nothing yet.

        Args:
            seeds: an address for each row of the batch.
            width: positions of a row.
            device: where numbers are wanted.
        """
        self.seeds, self.width, self.device = seeds, width, device
        self._drawn: dict[str, tuple[Tensor, dict[tuple[int, int], int]]] = {}  # tables, and their rows by row and step

    def of(self, purpose: str, row: Tensor, index: Tensor) -> Tensor:
        """Numbers (R, L) float64 in [0, 1) of rows at their steps.

        Args:
            purpose: what the numbers are for; each has its own.
            row: (R,) indices in the batch.
            index: (R,) steps that each row has taken before.
        """
        wanted = list(zip(row.tolist(), index.tolist(), strict=True))
        held = self._drawn.get(purpose)
        if held is None or any(each not in held[1] for each in wanted):
            drawn = [(number, step + later) for later in range(AHEAD) for number, step in wanted]
            addresses = [(self.seeds[number], purpose, step) for number, step in drawn]
            table = noise.uniforms(addresses, self.width).to(self.device)
            held = self._drawn[purpose] = table, {each: entry for entry, each in enumerate(drawn)}
        table, entries = held
        found = [entries[each] for each in wanted]
        if found == list(range(found[0], found[0] + len(found))):  # as they were drawn
            return table[found[0] : found[0] + len(found)]
        return table[torch.tensor(found, device=self.device)]


@dataclass(frozen=True, kw_only=True)
class DecodeStep:
    """One step of R rows in one block.

    Attributes:
        frame: what is the same at all steps.
        row: (R,) indices in the batch.
        index: (R,) steps that each row has taken before.
        in_block: those of them in this block, as many for each row: one that is not full takes a step whenever another does.
        block_masks: (R,) positions that were masked when the block began.
        block: which block it is.
        start: its first position in the completion.
        open: (R, W) positions of the block that may be committed now.
        ids: (R, T) canvas, prompt and completion.
        attention_mask: (R, T) bool, False at padding.
        prompt: its number of columns.
        draws: random numbers of the rows of the batch; None for a decode that was given no seeds.
        hidden: hidden states (R, T, H) of the canvas, as many as the scorer asked for.
    """

    frame: Frame
    row: Tensor
    index: Tensor
    in_block: int
    block_masks: Tensor
    block: int
    start: int
    open: Tensor
    ids: Tensor
    attention_mask: Tensor
    prompt: int
    draws: Draws | None = None
    hidden: tuple[Tensor, ...] = ()

    @property
    def last(self) -> bool:
        """Whether it is the last of its block's steps, or after it.

        Raises:
            InputError: the steps cannot be divided among the blocks.
        """
        return self.in_block >= self.frame.block_steps - 1

    @property
    def completion(self) -> Tensor:
        """Tokens (R, L), the mask token where there is none yet."""
        return self.ids[:, self.prompt :]

    @cached_property
    def place(self) -> tuple[Tensor, Tensor]:
        """Row (N,), among the R, and column (N,), among the W, of each open position."""
        row, column = self.open.nonzero(as_tuple=True)
        return row, column

    @cached_property
    def position(self) -> Tensor:
        """Position (N,) in the completion of each open position."""
        return self.place[1] + self.start

    @property
    def owner(self) -> Tensor:
        """Row (N,), among the R, of each open position."""
        return self.place[0]

    def uniform(self, purpose: str) -> Tensor:
        """A number (N,) float64 in [0, 1) for each open position, addressed by row, step and position.

        Raises:
            ValueError: the decode was given no seeds.
        """
        if self.draws is None:
            raise ValueError("this decoder draws random numbers, give it one seed for each row")
        return self.draws.of(purpose, self.row, self.index)[self.owner, self.position]


def setting(value: Setting, step: DecodeStep) -> Tensor:
    """The setting's number (R,) float64 for each row."""
    if callable(value):
        return value(step)
    return torch.full(step.row.shape, float(value), dtype=torch.float64, device=step.open.device)
