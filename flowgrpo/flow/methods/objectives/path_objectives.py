"""The prefix ratio: the likelihood ratio of the whole path that leads to an edge, clipped in log space."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from pydantic import Field
from typing_extensions import override

from flowgrpo.flow.methods.objectives.policy_gradient import ClipRange, LossInputs, PolicyGradient
from flowgrpo.schema.base import Positive
from flowgrpo.schema.imports.heavy import Tensor
from flowgrpo.training.advantages.clipped_ratio import path_bounds, path_clip_loss, path_clip_mask


def prefix_log_ratio(inputs: LossInputs) -> Tensor:
    """Return the log ratio (E,) of the paths from the root to the edges, with gradient through the edges' own step only.

    It sums log_prob - old_log_prob over the trained steps of the path, including the edge (CTPO, arXiv 2605.07331, the
    ratio of a token's prefix). Earlier steps enter as constants: each of them has a loss of its own.
    """
    return inputs.earlier + (inputs.log_prob - inputs.old_log_prob)


class PrefixRatio(PolicyGradient):
    """CTPO: clip the ratio of an edge's prefix in log space, by bounds that grow along the path.

    The ratio of one step supposes that the rollout's policy and the present one visit the same states. With stale rollouts
    they do not; the prefix contains the ratio of the states, too.
    """

    likelihoods: ClassVar[Sequence[str]] = ("trajectory",)

    name: Literal["prefix_ratio"] = "prefix_ratio"
    clip_range: ClipRange = [1e-4, 2e-4]
    """At a path's first trained step the log of the ratio is clipped to -+ it; or to -low and high, of [low, high]."""
    power: float = Field(0.5, ge=0)
    """At a path's t-th trained step the bounds are t to this power times as wide; 0: alike at all."""
    dual: Positive | None = 1.0
    """Where A < 0, log ratios above this times the upper bound have no gradient (arXiv 1912.09729); null: all have."""

    @property
    @override
    def needs_prefix(self) -> bool:
        return True

    @override
    def loss(self, inputs: LossInputs) -> Tensor:
        return path_clip_loss(prefix_log_ratio(inputs), inputs.advantage, self._bounds(inputs))

    @override
    def clipped(self, inputs: LossInputs) -> Tensor:
        return path_clip_mask(prefix_log_ratio(inputs), inputs.advantage, self._bounds(inputs))

    @override
    def above(self, inputs: LossInputs) -> Tensor:
        return prefix_log_ratio(inputs) > 0

    def _bounds(self, inputs: LossInputs) -> tuple[Tensor, Tensor, Tensor]:
        return path_bounds(inputs.position.to(inputs.log_prob), self.clip_range, power=self.power, dual=self.dual)
