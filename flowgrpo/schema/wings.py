"""Common parts of the sections of flow models and texts; each kind declares its own."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, Protocol

from flowgrpo.schema.base import Strict

if TYPE_CHECKING:
    from flowgrpo.schema.imports.heavy import Tensor
    from flowgrpo.schema.lora import Lora, LoraPath, Quantised


class ModelSection(Strict):
    """The model, and the part of it that is trained."""

    if TYPE_CHECKING:  # each kind declares them in its own order
        path: str
        variant: str | None
        dtype: str
        lora: Lora | None
        merge: LoraPath | None
        quantise: Quantised | None
        gradient_checkpointing: bool
        offload_activations: bool


class BaselineProtocol(Protocol):
    """A baseline; see `training.advantages.baseline.Baseline`."""

    @property
    def combine(self) -> str:
        """How several rewards are combined."""

    @property
    def caution(self) -> float:
        """Penalty per unit of variance among a sample's rewards."""

    @property
    def drops(self) -> str | None:
        """The option that removes edges from the update by reward."""

    def advantages(
        self,
        values: Tensor,
        weights: Tensor,
        comparison: Tensor,
        *,
        anchor: Tensor | None = None,
        expected: Tensor | None = None,
        nested: Any = None,
    ) -> Tensor:
        """Return the advantages (U,) of units within their sets."""

    def dropped(self, advantages: Tensor, values: Tensor, comparison: Tensor) -> Tensor:
        """Return a mask (U,) of units whose edges leave the update."""


class KlProtocol(Protocol):
    """A divergence."""

    @property
    def beta(self) -> float:
        """Its initial coefficient."""


class ObjectiveProtocol(Protocol):
    """An objective."""

    @property
    def name(self) -> str:
        """The name of the choice."""

    @property
    def kl(self) -> KlProtocol:
        """Its divergence from the reference."""


class AlgorithmSection(Strict):
    """A preset with any of its axes replaced."""

    if TYPE_CHECKING:  # likewise
        preset: str
        baseline: BaselineProtocol
        objective: ObjectiveProtocol

    @abstractmethod
    def roots(self, group_size: int) -> int:
        """Return the number of initial states for a group of `group_size` trained trajectories."""

    @property
    @abstractmethod
    def keeps_groups_whole(self) -> str | None:
        """Return the setting that requires each group to stay on one process; None if none does."""


class Drafted(Strict):
    """Options for choosing a group's starts by cheap drafts."""

    if TYPE_CHECKING:  # likewise
        pool: int
        call: dict[str, Any]
        precision: Any
