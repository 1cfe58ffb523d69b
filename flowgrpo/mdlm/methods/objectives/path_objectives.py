"""The prefix ratio: a token weighed by the likelihood of all that was written up to it, clipped in log space."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from typing_extensions import override

from flowgrpo.mdlm.methods.likelihoods.masked_views import Views
from flowgrpo.mdlm.methods.objectives.objective import Divergence, LossInputs, Objective, Pair
from flowgrpo.schema.base import Positive
from flowgrpo.schema.imports.heavy import Tensor, torch
from flowgrpo.training.advantages.clipped_ratio import LIMIT, path_bounds, path_clip_loss, path_clipped

ORDERED = ("autoregressive", "trajectory")  # likelihoods whose views follow the order in which tokens are written


def prefixes(log_ratio: Tensor, scored: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    """Sum (B, L) of the log ratios, each cut to +-20, of all tokens written up to each, and their number (B, L).

    Tokens of one step are written from the same canvas at once: each has all of them in its sum.

    Args:
        log_ratio: (B, L) of each token.
        scored: (B, L) bool; the others are in no sum.
        order: (B, L) int64, the step at which each was written.
    """
    steps = torch.zeros(len(order), int(order.max()) + 1, dtype=log_ratio.dtype, device=log_ratio.device)
    sums, counts = (
        steps.scatter_add(1, order, each * scored).cumsum(1).gather(1, order)
        for each in (log_ratio.clamp(-LIMIT, LIMIT), torch.ones_like(log_ratio))
    )
    return sums, counts


class PrefixRatio(Objective):
    """CTPO (arXiv 2605.07331): the ratio of a token is that of all tokens up to it, with gradient through its own only.

    By its code, of models that write from left to right. A token's ratio alone supposes that both policies come to the same
    canvas, which they do not where completions are stale. Here a token's prefix is what was written at earlier steps and at
    its own, in the order of the likelihood, `autoregressive` or `trajectory`.
    """

    name: Literal["prefix_ratio"] = "prefix_ratio"
    clip_range: Positive | Pair = [0.025, 0.05]
    """At the first token the log of the ratio is clipped to -+ it; or to -low and high, of [low, high]."""
    power: float = Field(0.5, ge=0)
    """Where a prefix has t tokens the bounds are t to this power times as wide; 0: alike at all."""
    dual: Positive | None = 1.0
    """Where A < 0, log ratios above this times the upper bound have no gradient (arXiv 1912.09729); null: all have."""
    kl: Divergence = Divergence()
    """A pull to the reference, or to the policy that made the answers."""

    @override
    def separable(self, views: Views) -> bool:
        """False: a token's ratio has those of earlier views in it."""
        return False

    @override
    def loss(self, inputs: LossInputs) -> Tensor:
        ratio, bounds = self._prefix(inputs)
        loss = (self._weight(inputs) * path_clip_loss(ratio, inputs.advantage[:, None], bounds)).sum()
        return loss if self.kl.beta == 0 else loss + self.kl.loss(inputs)

    @override
    def log_ratio(self, inputs: LossInputs) -> Tensor:
        """The log ratio (B, L) of each token alone."""
        return inputs.gap(inputs.old).sum(0)

    @override
    def stopped(self, inputs: LossInputs) -> Tensor:
        """Which scored tokens have no gradient, (B, L) bool."""
        ratio, bounds = self._prefix(inputs)
        return path_clipped(ratio, inputs.advantage[:, None], bounds) & (inputs.active_weight > 0).any(0)

    @override
    def above(self, inputs: LossInputs) -> Tensor:
        return self._prefix(inputs)[0] > 0

    def _weight(self, inputs: LossInputs) -> Tensor:
        return inputs.token_weight * (inputs.active_weight > 0).any(0)

    def _prefix(self, inputs: LossInputs) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """Log ratios (B, L) of the tokens' prefixes, with the gradient of their own, and the bounds of these."""
        own = self.log_ratio(inputs)
        sums, counts = prefixes(own.detach(), (inputs.active_weight > 0).any(0), inputs.order)
        bounds = path_bounds(counts.clamp(min=1), self.clip_range, power=self.power, dual=self.dual)
        return sums + own - own.detach(), bounds
