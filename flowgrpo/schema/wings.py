"""What the sections of flow models and of texts have in common, of which each kind declares its own."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, Protocol

from flowgrpo.schema.base import Strict

if TYPE_CHECKING:
    from flowgrpo.schema.imports.heavy import Tensor
    from flowgrpo.schema.lora import Lora, LoraPath, Quantised


class ModelSection(Strict):
    """The model, and what of it is trained."""

    if TYPE_CHECKING:  # each kind has them in an order of its own
        path: str
        variant: str | None
        dtype: str
        lora: Lora | None
        merge: LoraPath | None
        quantise: Quantised | None
        gradient_checkpointing: bool
        offload_activations: bool


class Comparing(Protocol):
    """What a baseline is to a loop; see `training.advantages.baseline.Baseline`."""

    @property
    def combine(self) -> str:
        """How several rewards are put together."""

    @property
    def caution(self) -> float:
        """What a unit of variance among a sample's rewards takes off."""

    @property
    def drops(self) -> str | None:
        """The option for which edges leave the update by their rewards."""

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
        """Advantages (U,) of units within their sets."""

    def dropped(self, advantages: Tensor, values: Tensor, comparison: Tensor) -> Tensor:
        """Whether (U,) the edges of each unit leave the update."""


class Pulling(Protocol):
    """What a divergence is to a loop."""

    @property
    def beta(self) -> float:
        """Its coefficient, to begin with."""


class Moving(Protocol):
    """What an objective is to a loop."""

    @property
    def name(self) -> str:
        """The name of the choice."""

    @property
    def kl(self) -> Pulling:
        """Its divergence from the reference."""


class AlgorithmSection(Strict):
    """A preset with any of its axes replaced."""

    if TYPE_CHECKING:  # likewise
        preset: str
        baseline: Comparing
        objective: Moving

    @abstractmethod
    def roots(self, group_size: int) -> int:
        """Number of initial states of a group of `group_size` trained trajectories."""

    @property
    @abstractmethod
    def keeps_groups_whole(self) -> str | None:
        """The setting, as it is written, for which all samples of a group must lie on one process; None if none does."""


class Drafted(Strict):
    """How the starts of a group are chosen by a draft."""

    if TYPE_CHECKING:  # likewise
        pool: int
        call: dict[str, Any]
        precision: Any
