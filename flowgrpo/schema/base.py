"""Base classes of config sections, and of choices with a name and options."""

from __future__ import annotations

from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Rate = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1)]


class Strict(BaseModel):
    """A config section that forbids unknown keys."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False, defer_build=True)


class Choice(Strict):
    """One choice for an axis of the algorithm (tree, kernel, baseline, ...): its name and its options."""

    name: str
    """The name of the choice."""


C = TypeVar("C", bound=Choice)


def named(*choices: type[C]) -> dict[str, type[C]]:
    """Return the choice classes by the default of their field `name`."""
    return {choice.model_fields["name"].default: choice for choice in choices}
