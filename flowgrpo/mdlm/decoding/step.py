"""Where the rows of a decode stand at one step: what proposals, scorers, modifiers and committers are told.

R rows are unfinished, W columns form the block that is being filled, L is the length of a completion.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flowgrpo.schema.base import NotNegative, Rate
from flowgrpo.schema.lazy import lazy

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from samplers import noise
    from samplers.noise import Address
else:
    torch = lazy("torch")
    noise = lazy("samplers.noise")


@dataclass(frozen=True)
class Step:
    """One step of R rows in one block.

    Attributes:
        row: (R,) places in the batch.
        index: (R,) steps that each row has taken before.
        in_block: (R,) those of them in this block.
        block_masks: (R,) positions that were masked when the block began.
        block: which block it is.
        start: its first position in the completion.
        open: (R, W) positions of the block that may be committed now.
        ids: (R, T) canvas, prompt and completion.
        attention_mask: (R, T) bool, False at padding.
        prompt: its number of columns.
        seeds: an address of random numbers for each row of the batch; None for a decode that draws none.
        hidden: hidden states (R, T, H) of the canvas, as many as the scorer asked for.
    """

    row: Tensor
    index: Tensor
    in_block: Tensor
    block_masks: Tensor
    block: int
    start: int
    open: Tensor
    ids: Tensor
    attention_mask: Tensor
    prompt: int
    seeds: Sequence[Address] | None = None
    hidden: tuple[Tensor, ...] = ()

    @property
    def completion(self) -> Tensor:
        """Tokens (R, L), the mask token where there is none yet."""
        return self.ids[:, self.prompt :]

    @property
    def position(self) -> Tensor:
        """Position (N,) in the completion of each open place."""
        return self.open.nonzero()[:, 1] + self.start

    @property
    def owner(self) -> Tensor:
        """Row (N,), among the R, of each open place."""
        return self.open.nonzero()[:, 0]

    def uniform(self, purpose: str) -> Tensor:
        """A number (N,) float64 in [0, 1) for each open place, addressed by row, step and position.

        Raises:
            ValueError: the decode was given no seeds.
        """
        if self.seeds is None:
            raise ValueError("this decoder draws random numbers, give it one seed for each row")
        width = self.completion.shape[1]
        drawn = [
            noise.generator(self.seeds[row], purpose, index).random(width)
            for row, index in zip(self.row.tolist(), self.index.tolist(), strict=True)
        ]
        whole = torch.stack([torch.from_numpy(numbers) for numbers in drawn]).to(self.open.device)  # (R, L)
        return whole[self.owner, self.position]


Setting = NotNegative | Callable[[Step], Any]  # a number, or a tensor (R,): one for each row of a step
Fraction = Rate | Callable[[Step], Any]  # the same, up to 1


def setting(value: Setting, step: Step) -> Tensor:
    """The setting's number (R,) float64 for each row."""
    if callable(value):
        return value(step)
    return torch.full(step.row.shape, float(value), dtype=torch.float64, device=step.open.device)
