"""The prefix-ratio objective: the likelihood ratio of the whole path up to an edge, clipped in log space."""

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
    """Return the log ratio (E,) of the path from the root to each edge; only the edge's own step has a gradient.

    It sums log_prob - old_log_prob over the trained steps of the path, including the edge (CTPO, arXiv 2605.07331: the
    ratio of a token's prefix). Earlier steps are constants, since each of them has its own loss.
    """
    return inputs.earlier + (inputs.log_prob - inputs.old_log_prob)


class PrefixRatio(PolicyGradient):
    """CTPO (arXiv 2605.07331): the ratio of the path up to an edge, clipped in log space; bounds grow along the path.

    The ratio of one step alone assumes that the rollout policy and the current policy visit the same states. With stale
    rollouts they do not. The ratio of the path also corrects for this.
    """

    likelihoods: ClassVar[Sequence[str]] = ("trajectory",)

    name: Literal["prefix_ratio"] = "prefix_ratio"
    clip_range: ClipRange = [1e-4, 2e-4]
    """At the first trained step the log ratio is clipped to [-c, c]; with [low, high], to [-low, high]."""
    power: float = Field(0.5, ge=0)
    """At the t-th trained step of a path the bounds are t^power times as wide; 0: equal at all steps."""
    dual: Positive | None = 1.0
    """If A < 0, log ratios above dual x (upper bound) have no gradient (arXiv 1912.09729); null: no such bound."""

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
