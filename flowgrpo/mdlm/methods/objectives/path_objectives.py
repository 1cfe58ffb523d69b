"""The prefix ratio: each token takes the ratio of all tokens written up to it, clipped in log space."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field
from typing_extensions import override

from flowgrpo.mdlm.methods.objectives.objective import Divergence, LossInputs, Objective, Pair
from flowgrpo.schema.base import Positive
from flowgrpo.schema.imports.heavy import Tensor, torch
from flowgrpo.training.advantages.clipped_ratio import LIMIT, path_bounds, path_clip_loss, path_clip_mask

ORDERED = ("autoregressive", "trajectory")  # likelihoods whose views follow the order of writing


def prefixes(log_ratio: Tensor, scored: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    """Return, for each token, the summed log ratios (B, L) of all tokens written up to it, and their number (B, L).

    Each log ratio is first clamped to +-20. Tokens of one step are written at once, so the prefix of each includes all of
    them. `log_ratio` (B, L) is that of each token, `scored` (B, L) bool marks the tokens to include, `order` (B, L) int64 is
    the step that wrote each.
    """
    steps = torch.zeros(len(order), int(order.max()) + 1, dtype=log_ratio.dtype, device=log_ratio.device)
    sums, counts = (
        steps.scatter_add(1, order, each * scored).cumsum(1).gather(1, order)
        for each in (log_ratio.clamp(-LIMIT, LIMIT), torch.ones_like(log_ratio))
    )
    return sums, counts


class PrefixRatio(Objective):
    """CTPO (arXiv 2605.07331): each token takes the ratio of all tokens up to it; the gradient flows through its own only.

    The ratio of a token alone assumes that both policies reach the same canvas, which is wrong for stale completions. The
    paper's code is for models that write from left to right. Here the prefix of a token consists of the tokens written at
    earlier steps and at its own, in the order of the likelihood (`autoregressive` or `trajectory`).
    """

    name: Literal["prefix_ratio"] = "prefix_ratio"
    by_token: ClassVar[bool] = True
    clip_range: Positive | Pair = [0.025, 0.05]
    """Clip of the log ratio at the first token: one bound for both sides, or [low, high] for -low and high."""
    power: float = Field(0.5, ge=0)
    """For a prefix of t tokens the bounds are multiplied by t to this power; 0: the same bounds for all."""
    dual: Positive | None = 1.0
    """If A < 0, log ratios above this times the upper bound have no gradient (arXiv 1912.09729); null: no such bound."""
    kl: Divergence = Divergence()
    """KL term to the reference, or to the policy that sampled the answers."""

    @override
    def loss(self, inputs: LossInputs) -> Tensor:
        ratio, bounds = self._prefix(inputs)
        weight = inputs.token_weight * (inputs.active_weight > 0).any(0)
        return (weight * path_clip_loss(ratio, inputs.token_advantage, bounds)).sum() + self.kl.loss(inputs)

    @override
    def log_ratio(self, inputs: LossInputs) -> Tensor:
        return inputs.gap(inputs.old).sum(0)

    @override
    def stopped(self, inputs: LossInputs) -> Tensor:
        ratio, bounds = self._prefix(inputs)
        return path_clip_mask(ratio, inputs.token_advantage, bounds) & (inputs.active_weight > 0).any(0)

    @override
    def above(self, inputs: LossInputs) -> Tensor:
        return self._prefix(inputs)[0] > 0

    def _prefix(self, inputs: LossInputs) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """Return the log ratio (B, L) of each token's prefix, with gradient through that token only, and the bounds."""
        log_ratio = self.log_ratio(inputs)
        sums, counts = prefixes(log_ratio.detach(), (inputs.active_weight > 0).any(0), inputs.order)
        bounds = path_bounds(counts.clamp(min=1), self.clip_range, power=self.power, dual=self.dual)
        return sums + log_ratio - log_ratio.detach(), bounds
