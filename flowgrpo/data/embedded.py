"""The embedded models: names that mean a model which comes with this package."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from flowgrpo.shapes import PATH

Kind = Literal["flow", "mdlm"]


@dataclass(frozen=True)
class Embedded:
    """An embedded model.

    Attributes:
        kind: of a run that trains it.
        folder: where its files are.
        call: default arguments of a pipeline's call.
    """

    kind: Kind
    folder: Path
    call: dict[str, Any] = field(default_factory=dict)


EMBEDDED = {
    "shapes": Embedded(
        "flow",
        PATH,
        {"num_inference_steps": 10, "guidance_scale": 1.0, "height": 64, "width": 64, "max_sequence_length": 1},
    ),
    "digits": Embedded("mdlm", Path(__file__).parents[1] / "mdlm" / "digits"),
}


def names(kind: Kind) -> list[str]:
    """The embedded models of a kind."""
    return [name for name, model in EMBEDDED.items() if model.kind == kind]


def place_of(path: str) -> str:
    """The folder of an embedded model; any other path as it is."""
    return str(EMBEDDED[path].folder) if path in EMBEDDED else path


def call_of(path: str) -> dict[str, Any]:
    """The default arguments of an embedded model's call; none of any other."""
    return EMBEDDED[path].call if path in EMBEDDED else {}
