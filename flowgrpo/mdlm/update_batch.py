"""The completions of one optimizer step of a text model, with all that their loss needs."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import torch

from flowgrpo.mdlm.methods.likelihoods.answers import Answers
from flowgrpo.mdlm.methods.likelihoods.masked_views import Views
from flowgrpo.mdlm.rollouts.rollout import BROKEN

Tensor = torch.Tensor
LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class UpdateBatch:
    """The completions of one optimizer step, and all that their loss needs.

    Attributes:
        rows: (B,) int64 indices of the completions in the iteration's batch.
        group: (B,) int64 group of each completion.
        rank: (B,) reward of each by which the objective ranks good completions; 0 without one.
        advantage, weight: (B,) advantage and loss weight of each completion, or (B, L) of its tokens.
        step: (B, L) int64 step of each token, for the aggregation.
        branch: (B, L) int64 branch of each token if tokens of a branch are trained on once, in its first completion; else
            None.
        views: masked copies from which the likelihoods are estimated.
        old: (n, B, L) log p under the policy that sampled the completions; None if that is still the trained policy.
        reference: (n, B, L) log p under the reference; None without a KL term.
        measure: (B, L) number of each token's prediction under that policy, `Shape.measure`; None if no rule uses one.
        correction: (B, L) importance weight of each token that an engine drew; None if no engine sent log-probabilities.
    """

    rows: Tensor
    group: Tensor
    rank: Tensor
    answers: Answers
    advantage: Tensor
    weight: Tensor
    step: Tensor
    branch: Tensor | None
    views: Views
    old: Tensor | None
    reference: Tensor | None
    measure: Tensor | None = None
    correction: Tensor | None = None

    def finite(self) -> UpdateBatch:
        """Drop completions with a log-probability that is not finite: a weight of 0 would still give a NaN gradient.

        Tokens of a branch that its first completion scored are then scored by the first one that is left.
        """
        scores = {"old": self.old, "reference": self.reference, "measure": self.measure}
        known = {name: each for name, each in scores.items() if each is not None}
        if all(each.isfinite().all() for each in known.values()):
            return self
        views, branch, shape = self.views, self.branch, self.answers.scored.shape
        known = {name: each.view(-1, *shape) for name, each in known.items()}
        if branch is not None:
            known = {name: self.views.spread(each, branch, self.answers.scored) for name, each in known.items()}
            views = replace(views, weight=views.spread(views.weight, branch, self.answers.scored))
        finite = torch.stack([each.isfinite().all(2).all(0) for each in known.values()]).all(0)
        index = finite.nonzero()[:, 0]
        LOGGER.warning(BROKEN, len(self.rows) - len(index), len(self.rows), "not trained on")
        views, branch = views.of(index), None if branch is None else branch[index]
        views = views if branch is None else views.once(branch)
        scored = {"measure": views.scored.any(0)}
        left = {name: each[:, index] * scored.get(name, views.scored) for name, each in known.items()}
        if self.measure is not None:
            left["measure"] = left["measure"][0]
        return replace(
            self,
            rows=self.rows[index.cpu()],
            group=self.group[index],
            rank=self.rank[index],
            answers=self.answers.of(index),
            advantage=self.advantage[index],
            weight=self.weight[index],
            step=self.step[index],
            branch=branch,
            views=views,
            correction=None if self.correction is None else self.correction[index],
            **left,
        )
