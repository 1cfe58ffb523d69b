"""Credit rules for texts: which parts of the answers are compared, and by which rewards.

Every rule takes the branches of B answers and their rewards (B, R) float64, NaN where a reward is missing. The value of a
branch is the mean reward of the answers that share it.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, model_validator
from typing_extensions import override

from flowgrpo.errors import InputError
from flowgrpo.schema.base import Choice
from flowgrpo.schema.imports.heavy import Tensor, torch
from flowgrpo.training.advantages.credit_units import CreditUnits
from flowgrpo.training.advantages.tree_credit import depthwise_units, edge_units, nested_units, subtree_means

if TYPE_CHECKING:
    from flowgrpo.mdlm.decoding.decode import Rollout
    from flowgrpo.mdlm.methods.trees import Branches


class Credit(Choice):
    """Options of every credit rule."""

    by_branch: ClassVar[bool] = True
    """Whether the tokens of a branch have an advantage of their own; False: all tokens of an answer share one."""

    @abstractmethod
    def units(self, branches: Branches, rewards: Tensor, rollout: Rollout) -> CreditUnits:
        """Return the credit units of some answers."""

    def of_tokens(self, units: CreditUnits, branches: Branches, rollout: Rollout) -> Tensor:
        """Return the unit (B, L) int64 of each token; (B,) if all tokens of an answer share one."""
        if not self.by_branch:
            return torch.arange(len(branches.edge))
        return units.of_edge[branches.edge.gather(1, branches.level(rollout))]


class Terminal(Credit):
    """Give all tokens of an answer its reward; compare the answers of a group.

    On a tree a shared branch takes part with each of its answers. The sum of its gradients is that of `depthwise` with the
    group's mean as baseline.
    """

    name: Literal["terminal"] = "terminal"
    by_branch: ClassVar[bool] = False

    @override
    def units(self, branches: Branches, rewards: Tensor, rollout: Rollout) -> CreditUnits:
        paths, count = branches.paths, len(rewards)
        ends = [line[0] for line in paths.lines]
        group = torch.tensor([[paths.group[end]] for end in ends])
        root = torch.tensor([paths.root[end] for end in ends])
        return CreditUnits(rewards, group, torch.ones(count, dtype=torch.float64), torch.arange(count), root=root)


class Siblings(Credit):
    """Compare each branch with those that leave the same canvas (d-TreeRPO, arXiv 2512.09675; SPO-tree, 2505.23564).

    A = V(branch) - mean V of the siblings, with the baseline group_mean. The first branches of a group leave its prompt.
    SPO-tree drops branches of advantage 0 (`baseline.drop_zero`).
    """

    name: Literal["siblings"] = "siblings"
    weights: Literal["answers", "branches"] = "answers"
    """answers: a branch weighs as much as its answers do, which is the gradient of the mean reward; branches: all branches
    weigh alike (d-TreeRPO)."""

    @override
    def units(self, branches: Branches, rewards: Tensor, rollout: Rollout) -> CreditUnits:
        paths, edges = branches.paths, branches.paths.edges
        values = subtree_means(paths, rewards)[edges]
        states = [(-1, -1) if paths.step[i] == 1 else (paths.root[i], paths.parent[i] or 0) for i in edges]
        compared = [(paths.group[i], *state) for i, state in zip(edges, states, strict=True)]
        units = edge_units(paths, edges, values, compared)
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
    def units(self, branches: Branches, rewards: Tensor, rollout: Rollout) -> CreditUnits:
        log_prob = branches.log_prob(rollout) if self.weights == "path" else None
        return depthwise_units(branches.paths, rewards, beta=self.beta, log_prob=log_prob)


class Nested(Credit):
    """Compare each branch with nested sets: all branches of its depth, those below ever later splits, and its siblings.

    With the baseline leave_one_out the mean of a set leaves out the branch's own answers, so that the expected gradient is
    exact for all weights, see `training.advantages.comparison_sets.nested_leave_one_out`. With group_mean the mean includes
    them, as in GiGPO (arXiv 2505.10978), TEMPO (2509.18314), HGPO (2602.22817) and TreePO (2508.17445); the formulas of
    TEMPO and HGPO are *reconstructed* from reviews.
    """

    name: Literal["nested"] = "nested"
    group: float = Field(0.75, ge=0)
    """Weight of the comparison with all other branches of the depth in the group."""
    between: float = Field(0.0, ge=0)
    """Weight of each comparison with the branches of the depth below the same earlier branch."""
    siblings: float = Field(0.25, ge=0)
    """Weight of the comparison with the branches that leave the same canvas."""

    @model_validator(mode="after")
    def _some(self) -> Nested:
        if not self.group + self.between + self.siblings:
            raise InputError("algorithm.credit: nested compares nothing, raise group, between or siblings above 0")
        return self

    @override
    def units(self, branches: Branches, rewards: Tensor, rollout: Rollout) -> CreditUnits:
        paths = branches.paths
        return nested_units(
            paths,
            rewards,
            edges=paths.edges,
            depth=branches.edge.shape[1],
            group=self.group,
            between=self.between,
            siblings=self.siblings,
            starts={line[-1] for line in paths.lines},
        )
