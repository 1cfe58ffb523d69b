"""Snapshots of a policy while it learns: which are kept, and which of them an iteration draws."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pydantic import Field, model_validator

from flowgrpo.errors import InputError
from flowgrpo.schema.base import NotNegative, Strict
from flowgrpo.schema.imports.heavy import Tensor, torch
from flowgrpo.schema.imports.lazy import lazy

if TYPE_CHECKING:
    from samplers import noise
else:
    noise = lazy("samplers.noise")


class Bank(Strict):
    """Snapshots of the live policy, of which each iteration draws one, all alike likely.

    Snapshot n is the policy after n x `every` optimizer steps of the run, snapshot 0 its start. It is taken when the
    iteration ends in which that step was, so that the one that an iteration has drawn is kept until then.
    """

    every: int = Field(30, ge=1)
    """Optimizer steps between two snapshots."""
    keep: int = Field(7, ge=1)
    """How many of the latest snapshots are kept."""

    def numbers(self, step: int) -> range:
        """The numbers of the snapshots that are kept after so many optimizer steps of the run."""
        newest = step // self.every
        return range(max(0, newest + 1 - self.keep), newest + 1)

    def draw(self, step: int, *address: Any) -> int:
        """The number of a snapshot of those that are kept then.

        Args:
            address: of the draw, see `samplers.noise`.
        """
        numbers = self.numbers(step)
        return numbers[int(noise.generator(*address).integers(len(numbers)))]


class Snapshots:
    """The snapshots that a bank keeps of trained tensors; none without a bank.

    Args:
        parameters: the trained tensors, as they start.

    Attributes:
        kept: by number, in the order of `parameters`.
    """

    def __init__(self, bank: Bank | None, parameters: Sequence[Tensor]):
        self._bank, self._parameters, self._drawn = bank, parameters, 0
        self.kept: dict[int, list[Tensor]] = {}
        self.fill(0)

    @property
    def drawn(self) -> list[Tensor]:
        """The snapshot that was drawn last."""
        return self.kept[self._drawn]

    def fill(self, step: int) -> None:
        """Keep what the bank has after so many optimizer steps of the run: what is not there yet is taken, the rest goes."""
        numbers = () if self._bank is None else self._bank.numbers(step)
        self.kept = {n: self.kept[n] if n in self.kept else self._taken() for n in numbers}

    def draw(self, step: int, *address: Any) -> None:
        """Draw a snapshot of those that are kept then; see `Bank.draw`."""
        if self._bank is not None:
            self._drawn = self._bank.draw(step, *address)

    def to(self, device: torch.device) -> None:
        """Put them on a device."""
        self.kept = {n: [x.to(device) for x in own] for n, own in self.kept.items()}

    def _taken(self) -> list[Tensor]:
        return [p.detach().clone() for p in self._parameters]


class Decay(Strict):
    """How the old policy follows the live one: after each iteration it is d old + (1 - d) live.

    d is `start` for the first `flat` optimizer steps of the run, and then start + slope x (steps since), `most` at most. Of
    LoRA's adapters the two factors are blended, as in the released code, which is not the blend of their product.
    """

    flat: int = Field(0, ge=0)
    """Optimizer steps for which d stays at `start`."""
    start: float = Field(0.0, ge=0, le=1)
    """d at the beginning; 0 copies the live policy."""
    slope: NotNegative = 0.0
    """By which d rises with each optimizer step."""
    most: float = Field(0.0, ge=0, le=1)
    """Largest d."""

    @model_validator(mode="after")
    def _rises(self) -> Decay:
        if self.most < self.start or (self.slope > 0 and self.most == self.start):
            raise InputError(
                f"algorithm.likelihood.old.most: {self.most:g} is no bound of a decay that begins at {self.start:g}"
                f"{' and rises' * (self.slope > 0)}, take more"
            )
        return self

    def at(self, step: int) -> float:
        """d after so many optimizer steps of the run."""
        return min(self.start + self.slope * max(step - self.flat, 0), self.most)

    @property
    def copies(self) -> bool:
        """Whether the old policy is always the live one as it stood before the iteration."""
        return self.start == self.slope == 0
