"""The settings of a decoder that a learned schedule may draw as actions, and their bounds."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from flowgrpo.errors import InputError
from flowgrpo.mdlm.decoding.decode import Decoder
from flowgrpo.mdlm.decoding.rules.commit_rules import Remaining
from flowgrpo.mdlm.decoding.rules.logit_modifiers import Gumbel
from rewards.base import nearest

BOUNDS = MappingProxyType(
    {"ratio": (0.0, 1.0), "temperature": (0.0, 2.0), "selection_temperature": (0.0, 2.0), "cfg_scale": (0.0, 4.0)}
)


def check_start(start: Mapping[str, float | Sequence[float]], steps: int) -> None:
    """Raise InputError for an unknown action, a list without one number per step, or a number outside its bounds."""
    for name, written in start.items():
        if name not in BOUNDS:
            raise InputError(f"algorithm.schedule.start.{name}: unknown action, {nearest(name, BOUNDS)}")
        numbers: Sequence[float] = written if isinstance(written, Sequence) else [written]
        if isinstance(written, Sequence) and len(numbers) != steps:
            raise InputError(
                f"algorithm.schedule.start.{name}: {len(numbers)} numbers for {steps} steps, one a token of the length"
            )
        low, high = BOUNDS[name]
        if not all(low < number < high for number in array("f", numbers)):  # as float32
            raise InputError(f"algorithm.schedule.start.{name}: its numbers are to lie between {low} and {high}")


def check_action(name: str, decoder: Decoder) -> None:
    """Raise InputError if the decoder does not have the setting that the action `name` replaces."""
    known = {
        "temperature": True,
        "cfg_scale": True,
        "ratio": isinstance(decoder.committer, Remaining),
        "selection_temperature": any(isinstance(change, Gumbel) for change in decoder.modifiers),
    }
    if not known[name]:
        raise InputError(f"algorithm.schedule.start.{name}: the decoder has no such number, take the decoder scheduled")
