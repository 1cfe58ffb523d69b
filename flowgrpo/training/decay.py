"""How an old policy follows the live one."""

from __future__ import annotations

from pydantic import Field, model_validator

from flowgrpo.errors import InputError
from flowgrpo.schema.base import NotNegative, Strict


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
