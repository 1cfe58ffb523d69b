"""Objectives that couple the answers of a group."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, Literal

from typing_extensions import override

from flowgrpo.mdlm.methods.objectives.objective import Divergence, LossInputs, Objective, sequence_log_ratio
from flowgrpo.schema.base import Positive
from flowgrpo.schema.imports.heavy import Tensor, torch
from flowgrpo.training.advantages.group_losses import regression_loss


class Coupled(Objective):
    """An objective of whole groups; the loss of a group weighs as much as its answers do together."""

    couples: ClassVar[bool] = True

    kl: Divergence = Divergence()
    """KL term to the reference, or to the policy that sampled the answers."""

    @abstractmethod
    def group_loss(self, log_ratio: Tensor, advantage: Tensor) -> Tensor:
        """Return the loss of a group of K answers, from their log ratios (K,) and advantages (K,)."""

    @override
    def loss(self, inputs: LossInputs) -> Tensor:
        log_ratio, row_weight = self.log_ratio(inputs), inputs.row_weight
        members = [inputs.group == group for group in inputs.group.unique()]
        losses = [row_weight[own].sum() * self.group_loss(log_ratio[own], inputs.advantage[own]) for own in members]
        return torch.stack(losses).sum() + self.kl.loss(inputs)

    @override
    def stopped(self, inputs: LossInputs) -> Tensor:
        return torch.zeros_like(inputs.advantage, dtype=torch.bool)


class Regression(Coupled):
    """Reg-GRPO (arXiv 2506.07464): regression of a group's advantages on its log ratios, without clip and ratio.

    The log ratios of whole answers are centred in the group, and divided by their standard deviation or multiplied by a
    number.
    """

    name: Literal["regression"] = "regression"
    scale: Positive | None = None
    """Factor of the centred log ratios, which then have a finite optimum, A / scale; null: 1 / (their std + eps)."""
    eps: Positive = 0.01
    """Added to the standard deviation; the gradient where nothing has moved is in proportion to 1 / eps."""
    normalised: bool = True
    """Divide the log ratio by the answer's length."""

    @override
    def group_loss(self, log_ratio: Tensor, advantage: Tensor) -> Tensor:
        return regression_loss(log_ratio, advantage, scale=self.scale, eps=self.eps)

    @override
    def log_ratio(self, inputs: LossInputs) -> Tensor:
        return sequence_log_ratio(inputs, self.normalised)
