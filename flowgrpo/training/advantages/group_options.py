"""Options of the objectives that couple the samples of a group, for flow models and language models."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import model_validator

from flowgrpo.errors import InputError
from flowgrpo.schema.base import NotNegative, Positive, Strict
from flowgrpo.schema.imports.heavy import Tensor
from flowgrpo.training.advantages.group_losses import contrast_loss, regression_loss, trust_loss
from rewards.base import nearest


class RegressionOptions(Strict):
    """Options of Reg-GRPO's regression of advantages on log ratios."""

    scale: Positive | None = None
    """Factor of the centred log ratios, which then have a finite optimum, A / scale; null: 1 / (their std + eps)."""
    eps: Positive = 0.01
    """Added to the standard deviation; the gradient where nothing has moved is in proportion to 1 / eps."""

    @model_validator(mode="after")
    def _used(self) -> RegressionOptions:
        if self.scale is not None and self.eps != type(self).model_fields["eps"].default:
            raise InputError(
                "algorithm.objective.eps: with a scale nothing is divided by a standard deviation, remove eps"
            )
        return self

    def regression(self, log_ratio: Tensor, advantage: Tensor) -> Tensor:
        """Return the loss of a group, from log ratios and advantages (K,)."""
        return regression_loss(log_ratio, advantage, scale=self.scale, eps=self.eps)


class ContrastOptions(Strict):
    """Options of DisCO's contrast of good and bad samples."""

    temperature: Positive | None = None
    """Bad samples weigh in proportion to exp(score / temperature); null: the standard deviation of the group's scores."""
    rank_by: str | None = None
    """Name of a reward by which good samples weigh, in proportion to exp(reward / rank_temperature) (DRPO, arXiv
    2510.04474); give it `weight: 0`, so that it does not decide which are good. null: they weigh alike."""
    rank_temperature: Positive = 0.1
    """Temperature of the weights of good samples."""
    limit: NotNegative = 1e-4
    """KL from the policy of the ratio, -mean of a group's log ratios, below which there is no penalty."""
    penalty: NotNegative = 1e3
    """Coefficient of the penalty (KL - limit) KL, whose first factor has no gradient."""

    @model_validator(mode="after")
    def _used(self) -> ContrastOptions:
        if self.rank_by is None and self.rank_temperature != type(self).model_fields["rank_temperature"].default:
            raise InputError(
                "algorithm.objective.rank_temperature: without rank_by good samples weigh alike, name a reward there"
            )
        return self

    def contrast(self, score: Tensor, log_ratio: Tensor, advantage: Tensor, rank: Tensor) -> Tensor:
        """Return the loss of a group, from scores, log ratios, advantages and the ranking reward (K,)."""
        ranks = rank / self.rank_temperature
        loss = contrast_loss(score, advantage > 0, temperature=self.temperature, rank=ranks)
        return loss + trust_loss(log_ratio, limit=self.limit, penalty=self.penalty)


def rank_index(objective: object, names: Sequence[str]) -> int | None:
    """Return the index in `names` of the reward by which an objective ranks good samples; None if it ranks none.

    Raises InputError if no reward has the name.
    """
    rank_by = getattr(objective, "rank_by", None)
    if rank_by is None:
        return None
    if rank_by not in names:
        raise InputError(f"algorithm.objective.rank_by: {rank_by!r} is not one of rewards, {nearest(rank_by, names)}")
    return list(names).index(rank_by)
