"""Objectives of the likelihood ratio of a path: up to an edge (CTPO), or of the whole trajectory (GSPO)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from pydantic import Field
from typing_extensions import override

from flowgrpo.flow.methods.objectives.policy_gradient import Clipped, ClipRange, LossInputs, PolicyGradient
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
    span: ClassVar[Literal["edge", "prefix", "trajectory"]] = "prefix"

    name: Literal["prefix_ratio"] = "prefix_ratio"
    clip_range: ClipRange = [1e-4, 2e-4]
    """At the first trained step the log ratio is clipped to [-c, c]; with [low, high], to [-low, high]."""
    power: float = Field(0.5, ge=0)
    """At the t-th trained step of a path the bounds are t^power times as wide; 0: equal at all steps."""
    dual: Positive | None = 1.0
    """If A < 0, log ratios above dual x (upper bound) have no gradient (arXiv 1912.09729); null: no such bound."""

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


class TrajectoryRatio(Clipped):
    """GSPO (arXiv 2507.18071), carried over to flows: the trained steps of a trajectory share its ratio and its clip.

    A step takes the place of a token. Each edge has the gradient of its own step, times the ratio of the trajectory, so
    that the mean over the edges is the gradient of GSPO. If the edges of a trajectory have different advantages, this is
    the paper's GSPO-token. Above a split an edge takes the geometric mean of the ratios of the trajectories through it,
    which is ours. Without `normalised` the gradient is that of the product divided by the number of its steps.
    """

    likelihoods: ClassVar[Sequence[str]] = ("trajectory",)
    span: ClassVar[Literal["edge", "prefix", "trajectory"]] = "trajectory"

    name: Literal["trajectory_ratio"] = "trajectory_ratio"
    normalised: bool = True
    """Take the geometric mean of the ratios of the trajectory's trained steps (GSPO); false: their product."""

    @override
    def log_ratio(self, inputs: LossInputs) -> Tensor:
        own = inputs.log_prob - inputs.old_log_prob
        whole = inputs.whole / inputs.length if self.normalised else inputs.whole
        return whole + own - own.detach()
