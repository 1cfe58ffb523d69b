"""Objectives that couple the answers of a group."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, Literal

from typing_extensions import override

from flowgrpo.mdlm.methods.objectives.objective import (
    Divergence,
    LossInputs,
    Objective,
    sequence_log_prob,
    sequence_log_ratio,
)
from flowgrpo.schema.base import Positive
from flowgrpo.schema.imports.heavy import Tensor, torch
from flowgrpo.training.advantages.group_options import ContrastOptions, RegressionOptions


class Coupled(Objective):
    """An objective of whole groups; the loss of a group weighs as much as its answers do together."""

    couples: ClassVar[bool] = True

    normalised: bool = True
    """Divide an answer's log-probability by its length."""
    kl: Divergence = Divergence()
    """KL term to the reference, or to the policy that sampled the answers."""

    @abstractmethod
    def group_loss(self, log_ratio: Tensor, old: Tensor, advantage: Tensor, rank: Tensor) -> Tensor:
        """Return the loss of K answers of a group, from log ratios, old log-probabilities, advantages and ranks (K,)."""

    @override
    def loss(self, inputs: LossInputs) -> Tensor:
        old = sequence_log_prob(inputs, inputs.old, self.normalised)
        each = self.log_ratio(inputs), old, inputs.advantage, inputs.rank
        members = [inputs.group == group for group in inputs.group.unique()]
        losses = [inputs.row_weight[own].sum() * self.group_loss(*(x[own] for x in each)) for own in members]
        return torch.stack(losses).sum() + self.kl.loss(inputs)

    @override
    def log_ratio(self, inputs: LossInputs) -> Tensor:
        return sequence_log_ratio(inputs, self.normalised)

    @override
    def stopped(self, inputs: LossInputs) -> Tensor:
        return torch.zeros_like(inputs.advantage, dtype=torch.bool)


class Regression(RegressionOptions, Coupled):
    """Reg-GRPO (arXiv 2506.07464): regression of a group's advantages on its log ratios, without clip and ratio.

    The log ratios of whole answers are centred in the group, and divided by their standard deviation or multiplied by a
    number.
    """

    name: Literal["regression"] = "regression"

    @override
    def group_loss(self, log_ratio: Tensor, old: Tensor, advantage: Tensor, rank: Tensor) -> Tensor:
        return self.regression(log_ratio, advantage)


class Contrast(ContrastOptions, Coupled):
    """DisCO (arXiv 2505.12366): raises log p of a group's good answers (A > 0) above that of its bad ones.

    With aggregation `sequence_mean`, groups of one size pull alike, however many good and bad answers they have. `rank_by`
    makes it DRPO (arXiv 2510.04474), which weighs the good answers by a second reward.
    """

    name: Literal["contrast"] = "contrast"
    temperature: Positive | None = 10.0
    """Bad answers weigh in proportion to exp(log p / temperature); null: the standard deviation of the group's log p."""

    @override
    def group_loss(self, log_ratio: Tensor, old: Tensor, advantage: Tensor, rank: Tensor) -> Tensor:
        return self.contrast(old + log_ratio, log_ratio, advantage, rank)
