"""Credit rules for texts: which parts of the answers are compared, and by which rewards.

The value of a branch is the mean reward of the answers that share it.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field
from typing_extensions import override

from flowgrpo.schema.base import Choice
from flowgrpo.schema.imports.heavy import Tensor, torch
from flowgrpo.training.advantages.credit_units import CreditUnits
from flowgrpo.training.advantages.tree_credit import (
    NestedWeights,
    depthwise_units,
    edge_units,
    nested_units,
    subtree_means,
)

if TYPE_CHECKING:
    from flowgrpo.mdlm.decoding.decode import Rollout
    from flowgrpo.mdlm.methods.trees import Branches


@dataclass(frozen=True, kw_only=True)
class Earned:
    """B answers and what they earned."""

    branches: Branches
    rollout: Rollout
    rewards: Tensor  # (B, R) float64, NaN where a reward is missing
    drafts: Tensor | None  # (B, T, R) float64 rewards of `Rollout.drafts`, NaN behind a row's steps; None if not scored


class Credit(Choice):
    """Options of every credit rule."""

    by_token: ClassVar[bool] = True
    """Whether the tokens of an answer may differ in their advantage."""
    by_branch: ClassVar[bool] = True
    """Whether the tokens of a branch share an advantage, in all its answers."""

    @abstractmethod
    def units(self, earned: Earned) -> CreditUnits:
        """Return the credit units of some answers."""

    def of_tokens(self, units: CreditUnits, earned: Earned) -> Tensor:
        """Return the unit (B, L) int64 of each token; (B,) if all tokens of an answer share one."""
        branches = earned.branches
        return units.of_edge[branches.edge.gather(1, branches.level(earned.rollout))]

    def of_branches(self, units: CreditUnits, earned: Earned) -> Tensor:
        """Return the unit (B, S + 1) int64 of each branch of the answers, -1 for none."""
        return units.of_edge[earned.branches.edge]


class Terminal(Credit):
    """Give all tokens of an answer its reward; compare the answers of a group.

    On a tree a shared branch takes part with each of its answers. The sum of its gradients is that of `depthwise` with the
    group's mean as baseline.
    """

    name: Literal["terminal"] = "terminal"
    by_token: ClassVar[bool] = False
    by_branch: ClassVar[bool] = False

    @override
    def units(self, earned: Earned) -> CreditUnits:
        paths, count = earned.branches.paths, len(earned.rewards)
        ends = [line[0] for line in paths.lines]
        group = torch.tensor([[paths.group[end]] for end in ends])
        root = torch.tensor([paths.root[end] for end in ends])
        ones = torch.ones(count, dtype=torch.float64)
        return CreditUnits(earned.rewards, group, ones, torch.arange(count), root=root)

    @override
    def of_tokens(self, units: CreditUnits, earned: Earned) -> Tensor:
        return torch.arange(len(earned.rewards))

    @override
    def of_branches(self, units: CreditUnits, earned: Earned) -> Tensor:
        found = torch.full_like(earned.branches.edge, -1)
        found[:, -1] = torch.arange(len(found))
        return found


class Siblings(Credit):
    """Compare each branch with those that leave the same canvas (d-TreeRPO, arXiv 2512.09675; SPO-tree, 2505.23564).

    d-TreeRPO: A = V(branch) - mean V of its other siblings, the baseline leave_one_out. SPO-tree: A = V(branch) - mean V
    of all siblings, the value of what they leave, the baseline group_mean; it drops branches of advantage 0
    (`baseline.drop_zero`). The first branches of all trees of a group are siblings: they leave its prompt.
    """

    name: Literal["siblings"] = "siblings"
    weights: Literal["answers", "branches"] = "answers"
    """answers: a branch weighs as much as its answers do, which is the gradient of the mean reward; branches: all branches
    weigh alike (d-TreeRPO)."""

    @override
    def units(self, earned: Earned) -> CreditUnits:
        branches, paths = earned.branches, earned.branches.paths
        edges = paths.edges
        values = subtree_means(paths, earned.rewards)[edges]
        units = edge_units(paths, edges, values, branches.origins[edges].tolist())
        if self.weights == "answers":
            return units
        answers = branches.edge.new_zeros(len(paths.parent)).index_add(
            0, branches.edge.flatten(), torch.ones_like(branches.edge).flatten()
        )
        own = answers[edges].double()
        return replace(units, weight=own.mean() / own)


class Depthwise(Credit):
    """Compare each branch with all branches of its depth in the group (BranchGRPO, arXiv 2509.06040)."""

    name: Literal["depthwise"] = "depthwise"
    weights: Literal["uniform", "path"] = "uniform"
    """Weights of the answers in a branch's value: uniform, or path, softmax of beta times log p of the rest."""
    beta: float = Field(1.0, ge=0)
    """Sharpness of path weights."""

    @override
    def units(self, earned: Earned) -> CreditUnits:
        branches = earned.branches
        log_prob = branches.log_prob(earned.rollout) if self.weights == "path" else None
        return depthwise_units(branches.paths, earned.rewards, beta=self.beta, log_prob=log_prob)


class Nested(NestedWeights, Credit):
    """Compare each branch with nested sets of branches of its depth: of the group, of earlier branches, and siblings.

    Around each branch lie all branches of its depth in the group, then those of its tree, then those below the branches
    that it goes on from, from the earliest on, and last its siblings. Sets that are the same count once.

    With the baseline leave_one_out the mean of a set leaves out the branch's own answers, so that the expected gradient is
    exact for all weights, see `training.advantages.comparison_sets.nested_leave_one_out`. With group_mean the mean includes
    them, as in GiGPO (arXiv 2505.10978), TEMPO (2509.18314), HGPO (2602.22817) and TreePO (2508.17445); the formulas of
    TEMPO and HGPO are *reconstructed* from reviews.
    """

    name: Literal["nested"] = "nested"
    growth: float = Field(0.0, ge=0)
    """The k-th of a branch's sets, from the largest on, weighs k to this power times as much (HGPO's alpha)."""

    @override
    def units(self, earned: Earned) -> CreditUnits:
        paths = earned.branches.paths
        return nested_units(
            paths,
            earned.rewards,
            edges=paths.edges,
            depth=earned.branches.edge.shape[1],
            group=self.group,
            between=self.between,
            siblings=self.siblings,
            growth=self.growth,
            starts={line[-1] for line in paths.lines},
        )


class StepGain(Credit):
    """Give the tokens of a step what the model's prediction gained by them, and what later predictions earn.

    MDPO (arXiv 2508.13148 and its code): with r_t the reward of the completion that is predicted before step t, and r_S
    that of the finished answer, step t has r_(t+1) - r_t + mean of r_(t+2) ... r_S; the last step has r_S - r_(S-1) + r_S.
    Steps of one number are compared in a group: with group_mean and a std, the code's constant 1 cancels. Departures:

     1. A step trains the tokens that it committed; there all masked tokens of its prediction.
     2. A prediction has the likeliest token of every masked position; there drawn ones.
     3. All steps are trained on, with weight 1; there those of the largest advantages, with weights by the share of masked
        tokens and by confidence.
    """

    name: Literal["step_gain"] = "step_gain"
    by_branch: ClassVar[bool] = False

    @override
    def units(self, earned: Earned) -> CreditUnits:
        assert earned.drafts is not None, "the rollout scores them"
        steps, paths = earned.rollout.steps.cpu(), earned.branches.paths
        count, most, _ = earned.drafts.shape
        at = torch.arange(most + 1)
        reward = torch.nn.functional.pad(earned.drafts, (0, 0, 0, 1), value=torch.nan)
        reward[torch.arange(count), steps] = earned.rewards
        known = (at <= steps[:, None])[:, :, None] & reward.isfinite()
        # Sums and numbers of the known rewards from each step on.
        total, number = (x.flip(1).cumsum(1).flip(1) for x in (reward.where(known, 0.0), known.double()))
        last = (at[:-1] == steps[:, None] - 1)[:, :, None]
        after = torch.nn.functional.pad(total / number, (0, 0, 0, 1), value=torch.nan)[:, 2:]
        gain = reward.diff(dim=1) + reward[:, 1:].where(last, after)  # (B, T, R)
        answer, step = (at[:-1] < steps[:, None]).nonzero(as_tuple=True)
        of_edge = torch.full((count, most), -1)
        of_edge[answer, step] = torch.arange(len(answer))
        ends = torch.tensor([line[0] for line in paths.lines])[answer].tolist()
        group = torch.tensor([paths.group[end] for end in ends])
        ones = torch.ones(len(answer), dtype=torch.float64)
        root = torch.tensor([paths.root[end] for end in ends])
        return CreditUnits(gain[answer, step], torch.stack([group, step], 1), ones, of_edge, root=root)

    @override
    def of_tokens(self, units: CreditUnits, earned: Earned) -> Tensor:
        last = (earned.rollout.steps - 1).cpu()[:, None]
        return units.of_edge.gather(1, earned.rollout.step_map.cpu().clamp(min=0).minimum(last))

    @override
    def of_branches(self, units: CreditUnits, earned: Earned) -> Tensor:
        return units.of_edge.gather(1, (earned.rollout.steps - 1).cpu()[:, None])
