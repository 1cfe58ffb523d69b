"""The divergence mask: a ratio without a clip, which stops edges that have moved too far the wanted way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from typing_extensions import override

from flowgrpo.flow.methods.objectives.policy_gradient import LossInputs, PolicyGradient, plain_ratio, previous_kl
from flowgrpo.schema.base import Positive
from flowgrpo.schema.imports.heavy import Tensor


class KlMask(PolicyGradient):
    """Flow-DPPO (arXiv 2606.11025): -A ratio, and 0 where the step's KL from the rollout's reaches `limit`.

    Only an edge whose ratio has moved the way of its advantage is stopped: above 1 where A > 0, below 1 where A < 0. An
    edge that has moved the other way is still pulled back. The KL of two Gaussians of one std, averaged over dimensions, is
    mean (mu - mu_old)^2 / (2 std^2). The released code averages it as well; the paper's is a sum.
    """

    likelihoods: ClassVar[Sequence[str]] = ("trajectory",)

    name: Literal["kl_mask"] = "kl_mask"
    limit: Positive = 1e-5
    """KL of a step from the rollout's, averaged over dimensions, from which on the edge is stopped."""

    @property
    @override
    def needs_old_means(self) -> bool:
        return True

    @override
    def loss(self, inputs: LossInputs) -> Tensor:
        return (-inputs.advantage * plain_ratio(inputs)).where(~self.clipped(inputs), 0.0)

    @override
    def clipped(self, inputs: LossInputs) -> Tensor:
        gone = (inputs.log_prob - inputs.old_log_prob).detach() * inputs.advantage > 0
        return (previous_kl(inputs).detach() >= self.limit) & gone
