"""Base classes of the config sections that flow models and language models each declare in their own way."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from flowgrpo.schema.base import Strict

if TYPE_CHECKING:
    from flowgrpo.schema.lora import Lora, LoraPath, Quantised


class ModelSection(Strict):
    """The model, and the part of it that is trained."""

    if TYPE_CHECKING:  # subclasses declare the fields, in their own order
        path: str
        variant: str | None
        dtype: str
        lora: Lora | None
        merge: LoraPath | None
        quantise: Quantised | None
        gradient_checkpointing: bool
        offload_activations: bool


class AlgorithmSection(Strict):
    """A preset with any of its axes replaced."""

    if TYPE_CHECKING:  # likewise
        preset: str
        baseline: Any
        objective: Any

    @abstractmethod
    def roots(self, group_size: int) -> int:
        """Return the number of initial states for a group of `group_size` trained trajectories."""

    @property
    def ratio_hindrance(self) -> str | None:
        """Return why rewards cannot age by log ratios, and what to take; None if they can (`train.half_life.by`)."""
        return None

    @property
    @abstractmethod
    def keeps_groups_whole(self) -> str | None:
        """Return the setting that requires each group to stay on one process; None if none does."""


class Drafted(Strict):
    """Options of drafts: cheap samples from many initial states, whose rewards decide which of them a group uses."""

    if TYPE_CHECKING:  # likewise
        pool: int
        call: dict[str, Any]
        precision: Any
