"""Earlier policies: a bank of snapshots, and an old policy that follows the live (trained) policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pydantic import Field, model_validator

from flowgrpo.errors import InputError
from flowgrpo.schema.base import NotNegative, Strict
from flowgrpo.schema.imports.heavy import Tensor
from flowgrpo.schema.imports.lazy import lazy

if TYPE_CHECKING:
    from samplers import noise
else:
    noise = lazy("samplers.noise")


class Bank(Strict):
    """Options of a bank: snapshots of the live policy, from which each iteration draws one uniformly.

    Snapshot n is taken at the end of the iteration in which optimizer step n x `every` is reached. Snapshot 0 is the
    policy at the start of the run.
    """

    every: int = Field(30, ge=1)
    """Optimizer steps between two snapshots."""
    keep: int = Field(7, ge=1)
    """How many of the latest snapshots are kept."""

    def numbers(self, step: int) -> range:
        """Return the numbers of the snapshots that exist after `step` optimizer steps."""
        newest = step // self.every
        return range(max(0, newest + 1 - self.keep), newest + 1)

    def draw(self, step: int, *address: Any) -> int:
        """Draw the number of a snapshot that exists after `step` optimizer steps; for `address` see `samplers.noise`."""
        numbers = self.numbers(step)
        return numbers[int(noise.generator(*address).integers(len(numbers)))]


class Snapshots:
    """The snapshots of a bank by number (`kept`), in the order of `parameters`. Without a bank there are none."""

    def __init__(self, bank: Bank | None, parameters: Sequence[Tensor]):
        self._bank, self._parameters, self._drawn = bank, parameters, 0
        self.kept: dict[int, list[Tensor]] = {}
        self.fill(0)

    @property
    def drawn(self) -> list[Tensor]:
        """The snapshot that was drawn last."""
        return self.kept[self._drawn]

    def fill(self, step: int) -> None:
        """Take the snapshots that must exist after `step` optimizer steps and are missing; drop the others."""
        numbers = () if self._bank is None else self._bank.numbers(step)
        self.kept = {n: self.kept[n] if n in self.kept else clones(self._parameters) for n in numbers}

    def draw(self, step: int, *address: Any) -> None:
        """Draw a snapshot; see `Bank.draw`."""
        if self._bank is not None:
            self._drawn = self._bank.draw(step, *address)


def clones(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return detached copies of tensors."""
    return [p.detach().clone() for p in parameters]


class Decay(Strict):
    """The decay d of the old policy, which becomes d x old + (1 - d) x live after each iteration.

    d is `start` for the first `flat` optimizer steps. Then it is start + slope x (steps since), at most `most`. For
    LoRA adapters the two matrices are averaged separately, not their product, as in the released code.
    """

    flat: int = Field(0, ge=0)
    """Optimizer steps for which d stays at `start`."""
    start: float = Field(0.0, ge=0, le=1)
    """d at the beginning; 0 copies the live policy."""
    slope: NotNegative = 0.0
    """Increase of d with each optimizer step."""
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
        """Return d after `step` optimizer steps."""
        return min(self.start + self.slope * max(step - self.flat, 0), self.most)

    @property
    def copies(self) -> bool:
        """Whether the old policy is always a copy of the live policy before the iteration."""
        return self.start == self.slope == 0
