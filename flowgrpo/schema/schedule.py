"""The schedule of the learning rate, as a configuration has it."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field, model_validator

from flowgrpo.errors import InputError
from flowgrpo.schema.base import Strict


class Schedule(Strict):
    """A factor of the learning rate, over all optimizer steps of the run."""

    name: Literal["constant", "linear", "cosine", "polynomial", "cosine_with_restarts"] = "constant"
    """After the warm-up the factor stays (constant), falls in a line (linear), as a power of what is left (polynomial), as
    half a cosine wave (cosine) or as several (cosine_with_restarts)."""
    warmup: int = Field(0, ge=0)
    """Optimizer steps over which the factor rises in a line from 0."""
    floor: float = Field(0.0, ge=0, lt=1)
    """The factor at the end of the run."""
    power: float = Field(1.0, gt=0)
    """The power of polynomial."""
    cycles: int = Field(1, ge=1)
    """The waves of cosine_with_restarts."""

    @model_validator(mode="after")
    def _used(self) -> Schedule:
        for key, name in (("power", "polynomial"), ("cycles", "cosine_with_restarts")):
            if getattr(self, key) != 1 and self.name != name:
                raise InputError(f"train.schedule.{key}: {self.name} has none, take train.schedule.name={name}")
        return self

    def factor(self, step: int, total: int) -> float:
        """The factor at optimizer step `step`, counted from 0, of `total`: the formulas of transformers and diffusers.

        There too the first step of a warm-up has rate 0.
        """
        if step < self.warmup:
            return step / self.warmup
        done = (step - self.warmup) / max(1, total - self.warmup)
        fallen = {
            "constant": 1.0,
            "linear": 1 - done,
            "polynomial": (1 - done) ** self.power,
            "cosine": (1 + math.cos(math.pi * done)) / 2,
            "cosine_with_restarts": (1 + math.cos(math.pi * (self.cycles * done % 1))) / 2,
        }[self.name]
        return self.floor + (1 - self.floor) * fallen
