"""Credit rules: they turn the rewards of a tree's leaves into credit units, which are compared with each other.

Every rule takes `rewards` (leaves, R), float64 in the order of `tree.leaves`, NaN where a reward is missing.
Deterministic steps earn no credit. So the value of a state is the reward of the sample at the end of ODE steps from it.
A state without such a sample has no value.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

from pydantic import Field
from typing_extensions import override

from flowgrpo.errors import InputError
from flowgrpo.schema.base import Choice
from flowgrpo.schema.imports.heavy import Tensor, torch
from flowgrpo.schema.imports.lazy import lazy
from flowgrpo.training.advantages.baseline import weighted_sum
from flowgrpo.training.advantages.credit_units import CreditUnits
from flowgrpo.training.advantages.tree_credit import TreePaths, depthwise_units, edge_units

if TYPE_CHECKING:
    from samplers import trees
    from samplers.trees import Tree
else:
    trees = lazy("samplers.trees")


class Credit(Choice):
    """Options of every credit rule."""

    @abstractmethod
    def units(self, tree: Tree, rewards: Tensor, reward_weights: Tensor) -> CreditUnits:
        """Return the credit units of a tree; `reward_weights` is (R,). Raise InputError if the tree is unsuitable."""


class Terminal(Credit):
    """Give every edge of a trajectory the reward of its end; compare the trajectories of a group.

    Flow-GRPO (arXiv 2505.05470), DanceGRPO, MixGRPO. Twigs are not trajectories. Trajectories must share no edge.
    """

    name: Literal["terminal"] = "terminal"

    @override
    def units(self, tree: Tree, rewards: Tensor, reward_weights: Tensor) -> CreditUnits:
        of_edge = [-1] * len(tree.nodes)
        ends = trunk_ends(tree)
        for unit, index in enumerate(ends):
            for edge in tree.ancestry(tree.leaves[index]):
                if of_edge[edge] >= 0:
                    raise InputError(
                        "algorithm.credit: terminal needs trajectories that share no edge, such as those of chain; "
                        "for other trees take siblings or depthwise"
                    )
                of_edge[edge] = unit
        roots = [tree.nodes[tree.leaves[index]].root for index in ends]
        # An early stop may leave no trajectory, so the type is given.
        group, index = torch.tensor([(root.group, root.index) for root in roots], dtype=torch.long).reshape(-1, 2).T
        weight = torch.ones(len(ends), dtype=torch.float64)
        return CreditUnits(rewards[ends], group[:, None], weight, torch.tensor(of_edge), root=index)


class Siblings(Credit):
    """Give each stochastic edge the value of its child; compare it with its siblings, or with all edges of its step.

    TempFlow-GRPO (arXiv 2508.04324, process reward): A = (r - mean) / std over the children of one state. ODE steps
    must finish every stochastic edge. With `weights: steps` each of K siblings weighs 1 / K. Then the expected update
    does not depend on the number of children (ours).
    """

    name: Literal["siblings"] = "siblings"
    within: Literal["seed", "prompt"] = "seed"
    """seed: compare the children of one state; prompt: compare all children of a step in the group."""
    weights: Literal["edges", "steps"] = "edges"
    """edges: all edges weigh alike in the update; steps: all steps do, for any number of children."""

    @override
    def units(self, tree: Tree, rewards: Tensor, reward_weights: Tensor) -> CreditUnits:
        values, known = state_values(tree, rewards)
        edges = stochastic_edges(tree)
        if not all(known[i] for i in edges):
            raise InputError("algorithm.credit: siblings needs a tree that finishes its branches by ODE, such as brush")
        nodes = [tree.nodes[i] for i in edges]
        comparison = [(node.root.group, node.root.index if self.within == "seed" else 0, node.step) for node in nodes]
        units = edge_units(paths_of(tree), edges, values[edges], comparison)
        if self.weights == "edges":
            return units
        states = torch.tensor([node.parent for node in nodes])
        _, family, sizes = states.unique(return_inverse=True, return_counts=True)
        return replace(units, weight=1 / sizes[family].double())


class Depthwise(Credit):
    """Give each edge the fused reward of the leaves below its child; compare the edges of one depth in a group.

    BranchGRPO (arXiv 2509.06040): r(n) = sum of w_l r_l over the leaves l below n. The weights w are uniform, or the
    softmax of beta log p(l | n), the *summed* log-probability of the edges from n to l. The sums differ by tens of nats
    between leaves, so `path` with beta 1 nearly picks the likeliest leaf. beta = 1 / (dimensions of the state) gives
    the averaged form of the released code's option, which is close to uniform. An edge below the last split has the
    reward of its leaf. If a depth has only two nodes, their advantages are +-0.707, whatever their rewards.
    """

    name: Literal["depthwise"] = "depthwise"
    weights: Literal["uniform", "path"] = "uniform"
    """Weights of the leaves in a node's reward: uniform, or path, softmax of beta times their log-probability."""
    beta: float = Field(1.0, ge=0)
    """Sharpness of path weights."""

    @override
    def units(self, tree: Tree, rewards: Tensor, reward_weights: Tensor) -> CreditUnits:
        log_prob = _sum_log_probs(tree) if self.weights == "path" else None
        return depthwise_units(paths_of(tree), rewards[trunk_ends(tree)], beta=self.beta, log_prob=log_prob)


class StepGain(Credit):
    """Give each stochastic edge the value of its child minus the value of its parent.

    `step` normalises the gains of each step separately (DenseGRPO, arXiv 2601.20218). `joint` normalises the gains of
    all steps together, so that early steps keep their larger gains (Stepwise-Flow-GRPO, 2603.28718). Every state needs
    a value.
    """

    name: Literal["step_gain"] = "step_gain"
    compare: Literal["step", "joint"] = "step"
    """step: compare the gains of one step; joint: compare the gains of all steps together."""

    @override
    def units(self, tree: Tree, rewards: Tensor, reward_weights: Tensor) -> CreditUnits:
        values, known = state_values(tree, rewards)
        edges = stochastic_edges(tree)
        parents = [parent_of(tree, i) for i in edges]
        if not all(known[i] for i in (*edges, *parents)):
            raise InputError(
                "algorithm.credit: step_gain needs a value of every state, take the tree twigs with root: true"
            )
        comparison = [(tree.nodes[i].root.group, tree.nodes[i].step if self.compare == "step" else 0) for i in edges]
        return edge_units(paths_of(tree), edges, values[edges] - values[parents], comparison)


class DiscountedValue(Credit):
    """Give each stochastic edge the discounted return Q_k = r_k + discount Q_(k+1); r_k is the value of its child.

    VGPO (arXiv 2512.12387), *reconstructed* from its abstract (expected cumulative reward of each stage) and reviews
    (reward R_t of one jump from x_(t-1), t = T ... 1, and a discounted action value of it). The loss of an edge is
    weighted by Q_k / (mean Q of its trajectory). Its advantage is (Q - mean) / std + anchor Q within its group and
    step, so that it does not vanish if the rewards of a group are equal. The defaults of `discount` and `anchor` are
    ours. In the reviews the weight multiplies the advantage; here it multiplies the whole loss of the edge, with the
    KL. Rewards should not be negative: a value below 0 has weight 0. Every state needs a value; no tree may branch.
    """

    name: Literal["discounted_value"] = "discounted_value"
    discount: float = Field(0.9, ge=0, le=1)
    """Discount of the values of later states."""
    anchor: float = Field(0.1, ge=0)
    """Coefficient of Q in the advantage."""
    anchored_steps: int = Field(5, ge=0)
    """Number of steps, from the first, with the term anchor Q."""

    @override
    def units(self, tree: Tree, rewards: Tensor, reward_weights: Tensor) -> CreditUnits:
        values, known = state_values(tree, rewards)
        edges = stochastic_edges(tree)
        if not all(known[i] for i in edges):
            raise InputError("algorithm.credit: discounted_value needs a value of every state, take the tree twigs")
        chains: dict[int, list[int]] = {}  # by last edge
        extended: set[int] = set()
        for i in edges:  # parents come before children
            parent = parent_of(tree, i)
            if parent in extended:
                raise InputError("algorithm.credit: discounted_value needs chains, take the tree twigs")
            extended.add(parent)
            chains[i] = [*chains.pop(parent, []), i]
        quality = values.clone()
        for line in chains.values():
            for i, following in reversed(list(pairwise(line))) if self.discount else ():
                quality[i] += self.discount * quality[following]
        weight = torch.ones(len(tree.nodes), dtype=torch.float64)
        for line in chains.values():
            total = weighted_sum(quality[line], reward_weights).clamp(min=0)
            mean = total.nanmean()
            weight[line] = (total / mean).nan_to_num() if mean > 0 else 1.0
        comparison = [(tree.nodes[i].root.group, tree.nodes[i].step) for i in edges]
        anchored = [self.anchor * (tree.nodes[i].step <= self.anchored_steps) for i in edges]
        units = edge_units(paths_of(tree), edges, quality[edges], comparison)
        return replace(units, weight=weight[edges], anchor=torch.tensor(anchored, dtype=torch.float64))


def state_values(tree: Tree, rewards: Tensor) -> tuple[Tensor, Tensor]:
    """Return the value of each node (nodes, R), and a mask (nodes,) of the nodes that have one.

    The value is the reward of the sample at the end of the ODE steps from the node; if a twig and the trunk both lead
    to a sample, the twig's reward counts.
    """
    source = {node: leaf for leaf, node in enumerate(tree.leaves)}  # node -> the leaf whose reward is its value
    stochastic, by_twig = set(stochastic_edges(tree)), set()
    for i in range(len(tree.nodes) - 1, -1, -1):  # children before parents
        node = tree.nodes[i]
        if node.parent is None or i in stochastic or i not in source or node.parent in by_twig:
            continue
        source[node.parent] = source[i]
        if node.role == trees.TWIG:
            by_twig.add(node.parent)
    values = torch.full((len(tree.nodes), rewards.shape[1]), torch.nan, dtype=torch.float64)
    known = torch.zeros(len(tree.nodes), dtype=torch.bool)
    nodes = list(source)
    values[nodes], known[nodes] = rewards[list(source.values())].double(), True
    return values, known


def trunk_ends(tree: Tree) -> list[int]:
    """Return the indices in `tree.leaves` of the ends of trajectories, without the ends of twigs."""
    return [index for index, leaf in enumerate(tree.leaves) if tree.nodes[leaf].role != trees.TWIG]


def parent_of(tree: Tree, edge: int) -> int:
    """Return the node that an edge leaves."""
    parent = tree.nodes[edge].parent
    assert parent is not None  # no edge leads to a start
    return parent


def stochastic_edges(tree: Tree) -> list[int]:
    """Return the stochastic edges, each as the node it leads to, parents before children."""
    nodes = [
        node
        for evaluation in tree.evaluations
        for edges in evaluation.edges
        if edges.move.kernel.stochastic
        for node in edges.nodes.tolist()
    ]
    return sorted(nodes)


def paths_of(tree: Tree) -> TreePaths:
    """Return the trajectories of a tree, without its twigs."""
    return TreePaths(
        parent=[node.parent for node in tree.nodes],
        step=[node.step for node in tree.nodes],
        group=[node.root.group for node in tree.nodes],
        root=[node.root.index for node in tree.nodes],
        lines=[tree.ancestry(tree.leaves[index]) for index in trunk_ends(tree)],
    )


def _sum_log_probs(tree: Tree) -> Tensor:
    """Return the log-probability (nodes,) of the edge to each node, summed over dimensions; 0 for an ODE step."""
    total = torch.zeros(len(tree.nodes), dtype=torch.float64)
    dimensions = sum(x[0].numel() for x in tree.samples)
    for evaluation in tree.evaluations:
        for edges in evaluation.edges:
            if edges.log_prob is None:
                continue
            form = edges.move.kernel.log_prob
            if form == "constant_free":
                raise InputError(
                    "algorithm.credit.weights: path needs algorithm.kernel.log_prob mean or sum, a density"
                )
            total[edges.nodes] = edges.log_prob.double().cpu() * (dimensions if form == "mean" else 1)
    return total


def step_signs(tree: Tree, rewards: Tensor) -> Tensor:
    """Return the numbers (2, T) float64 of positive and of negative gains of each step; `rewards` is (leaves,)."""
    units = StepGain().units(tree, rewards[:, None], torch.ones(1))
    gains = units.values[:, 0]
    counts = torch.zeros(2, len(tree.sigmas) - 1, dtype=torch.float64)
    for row, sign in enumerate((gains > 0, gains < 0)):
        counts[row].index_add_(0, units.comparison[:, 1] - 1, sign.double())  # a unit is compared at its child's step
    return counts


def adjust_levels(
    levels: Sequence[float],
    positive: Tensor,
    negative: Tensor,
    *,
    steps: Sequence[float],
    difference: float,
    highest: float = math.inf,
) -> list[float]:
    """Return the noise levels (T,) after one round of DenseGRPO's calibration (arXiv 2601.20218, Algorithm 1).

    `positive` and `negative` (T,) count the gains above and below 0. A step's level rises by its increment in `steps`
    (T,) if its two counts differ by less than `difference`, and falls by it otherwise. A level stays between its
    increment and `highest`. A step without gains is deterministic and keeps its level.
    """
    moved, even = positive + negative > 0, (positive - negative).abs() < difference
    return [
        level if not some else min(level + step, highest) if rises else max(level - step, step)
        for level, step, some, rises in zip(levels, steps, moved.tolist(), even.tolist(), strict=True)
    ]
