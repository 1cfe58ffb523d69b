"""The update on final samples (`likelihood: elbo`): add fresh noise to a rollout's samples and score them.

Noise levels and noise are drawn by address (`samplers.noise`). So they are equal bit for bit for all policies, in any
batch, on any number of processes and after a resume.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any

import torch

from flowgrpo.flow.config import Config
from flowgrpo.flow.methods.likelihood import Elbo, bridge_moments, flatten_state
from flowgrpo.flow.methods.objectives.matching import Centred, Coupled, optimality
from flowgrpo.flow.methods.objectives.policy_gradient import ABSENT, LossInputs, PolicyGradient
from flowgrpo.flow.pipeline.policy import Policy
from flowgrpo.training.advantages.credit_units import CreditUnits
from flowgrpo.training.weights.optimizer_step import UpdateStats
from flowgrpo.training.weights.trained_weights import Weights
from samplers import noise
from samplers.batches import batched
from samplers.drawing import to_device
from samplers.kernels import State
from samplers.trees import Node, Tree

Tensor = torch.Tensor
Sum = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Draw:
    """One sample at one noise level.

    Attributes:
        leaf: index of the sample in `tree.leaves`.
        number: number of the draw.
        sign: sign of its noise.
        sigma: its noise level.
        edge: the edge on the sample's path, as the node it leads to, whose advantage the draw takes.
        shared: the last node, at or above the noise level, where the path splits below sigma 1; None without one or without
            `likelihood.bridge`.
    """

    leaf: int
    number: int
    sign: int
    _: KW_ONLY
    sigma: float
    edge: int
    shared: int | None = None


@dataclass(frozen=True)
class Call:
    """One call of the model: draws of one optimizer step (`part`)."""

    part: int
    draws: Sequence[Draw]

    @property
    def sigma(self) -> float | Tensor:
        """The noise level of all draws if it is one, else a float32 tensor (B,) of their levels."""
        levels = [draw.sigma for draw in self.draws]
        return levels[0] if len(set(levels)) == 1 else torch.tensor(levels)


@dataclass(frozen=True, kw_only=True)
class Noised:
    """The model calls of an update on final samples, as `calls_of` returns them; the samples are the leaves of the tree.

    Attributes:
        advantages: (nodes,) advantage of each edge.
        weights: (nodes,) weights of edges in the weighted mean of the loss.
        factors: (nodes,) factors of the loss that do not count in the divisor of the mean.
        ranks: (leaves,) reward by which the objective ranks good samples; 0 without one, NaN if unknown.
        address: random address of the iteration's noise.
    """

    likelihood: Elbo
    tree: Tree
    calls: Sequence[Call]
    advantages: Tensor
    weights: Tensor
    factors: Tensor
    ranks: Tensor
    address: tuple[Any, ...]

    @property
    def splits(self) -> bool:
        """Return whether several samples have one root."""
        roots = [self.tree.nodes[leaf].root for leaf in self.tree.leaves]
        return len({(root.group, root.index) for root in roots}) < len(roots)

    def of_part(self, part: int) -> list[Call]:
        """Return the calls of one optimizer step."""
        return [call for call in self.calls if call.part == part]

    def weight(self, part: int) -> float:
        """Return the sum of the weights of all draws of a part."""
        return sum(float(self.weights[draw.edge]) for call in self.of_part(part) for draw in call.draws)

    def node(self, draw: Draw) -> Node:
        """Return the tree node of a draw's sample."""
        return self.tree.nodes[self.tree.leaves[draw.leaf]]

    def rows(self, call: Call) -> list[Any]:
        """Return the rows (prompt conditions) of a call."""
        return [self.node(draw).root.row for draw in call.draws]

    def noised(self, call: Call) -> tuple[State, Tensor]:
        """Return the noised states x_t (B, ...) of a call, in the storage dtype, and targets (x_t - x0) / sigma (B, D)."""
        state, target = [], []
        for component, samples in enumerate(self.tree.samples):
            clean = samples[[draw.leaf for draw in call.draws]].float()
            drawn = torch.stack([self._noise(draw, component, clean.shape[1:]) for draw in call.draws])
            drawn = to_device(drawn, clean.device)
            of_clean, of_noise = (
                to_device(torch.tensor(weights).view(-1, *[1] * (clean.dim() - 1)), clean.device)
                for weights in ([1 - draw.sigma for draw in call.draws], [draw.sigma for draw in call.draws])
            )
            noised, aim = of_clean * clean + of_noise * drawn, drawn - clean
            for row, draw in enumerate(call.draws):
                if draw.shared is not None:
                    shared = self.tree.shared[draw.shared][component].float().to(clean.device)
                    of_own, of_shared, std = bridge_moments(draw.sigma, self.tree.nodes[draw.shared].sigma)
                    noised[row] = of_own * clean[row] + of_shared * shared + std * drawn[row]
                    aim[row] = (noised[row] - clean[row]) / draw.sigma
            state.append(noised.to(samples.dtype))
            target.append(aim)
        return tuple(state), flatten_state(tuple(target))

    def _noise(self, draw: Draw, component: int, shape: Sequence[int]) -> Tensor:
        node = self.node(draw)
        path = () if self.likelihood.noise == "group" else node.path
        return draw.sign * noise.noise(shape, *self.address, "noise", node.root.group, path, draw.number, component)


def select_samples(objective: PolicyGradient, tree: Tree, advantages: Tensor, keep: Tensor) -> Tensor:
    """Return a mask (leaves,) of those samples of `keep` that enter the loss, from their advantages (leaves,)."""
    if objective.couples != "group":
        return keep
    groups = torch.tensor([tree.nodes[leaf].root.group for leaf in tree.leaves])
    chosen = keep.clone()
    for group in groups[keep].unique():
        members = (keep & (groups == group)).nonzero().flatten()
        chosen[members] = objective.takes(advantages[members])
    return chosen


def find_finite(tree: Tree) -> Tensor:
    """Return a mask (leaves,), on the CPU, of the samples of a tree that are finite."""
    return torch.stack([x.flatten(1).isfinite().all(1).cpu() for x in tree.samples]).all(0)


class Paths:
    """The paths to the samples of a tree: which edge and which shared state belong to a noise level.

    `bridge` says whether draws below a split have a shared state.
    """

    def __init__(self, tree: Tree, units: CreditUnits, *, bridge: bool = False):
        self._nodes, self._owned = tree.nodes, (units.of_edge >= 0).tolist()
        self._lines = [tree.ancestry(leaf)[::-1] for leaf in tree.leaves]
        children = Counter(node.parent for node in tree.nodes if node.parent is not None)
        self._splits = {i for i, count in children.items() if bridge and count > 1 and tree.nodes[i].sigma < 1}

    def place(self, leaf: int, sigma: float) -> tuple[int, int | None]:
        """Return the edge whose advantage a draw at `sigma` takes, and the node of its shared state.

        This edge is the one whose step contains `sigma`, or the last one before it that has a credit unit.
        """
        edge, shared = self._lines[leaf][0], None
        for node in self._lines[leaf]:
            parent = self._nodes[node].parent
            assert parent is not None  # an edge leaves a node
            if self._nodes[parent].sigma < sigma:
                break
            edge = node if self._owned[node] else edge
            shared = parent if parent in self._splits else shared
        return edge, shared

    def last_edges(self) -> list[int]:
        """Return for each sample the last edge on its path that has a credit unit."""
        return [self.place(leaf, 0.0)[0] for leaf in range(len(self._lines))]


def calls_of(
    likelihood: Elbo,
    tree: Tree,
    units: CreditUnits,
    *,
    keep: Tensor,
    trained: Tensor,
    micro_batch: int,
    mixes_levels: bool,
    address: tuple[Any, ...],
) -> list[Call]:
    """Batch the trained samples' noised copies (draws) into calls, group by group, and in a group from noise to data.

    If the policy `mixes_levels`, all calls of a part but the last are full. Otherwise each call has one sigma, and the
    calls go from noise to data. `keep` (leaves,) is a mask of the trained samples, `trained` (U,) one of the units whose
    edges are trained: a draw at another edge is left out. Noise levels are drawn at the iteration's `address`, for each
    sample, or for each group if its samples share noise. Raise InputError if the likelihood needs more steps than the
    schedule has.
    """
    paths, shared = Paths(tree, units, bridge=likelihood.bridge), likelihood.noise == "group"
    trained = units.to_edges(trained.double()) > 0
    by_call: dict[tuple[float, int], list[tuple[Any, Draw]]] = defaultdict(list)  # by minus the common sigma, and part
    sigmas: dict[tuple[Any, ...], list[float]] = {}
    for leaf in keep.nonzero().flatten().tolist():
        node = tree.nodes[tree.leaves[leaf]]
        place = (node.root.group, () if shared else node.path)
        if place not in sigmas:
            sigmas[place] = likelihood.sigmas(tree.sigmas, *address, "sigmas", *place)
        for number, sigma in enumerate(sigmas[place]):
            edge, shared_node = paths.place(leaf, sigma)
            if not trained[edge]:
                continue
            for sign in (1, -1) if likelihood.antithetic else (1,):
                order = (node.root.group, -sigma, node.path, number, -sign)
                draw = Draw(leaf, number, sign, sigma=sigma, edge=edge, shared=shared_node)
                by_call[0.0 if mixes_levels else -sigma, node.root.part].append((order, draw))
    return [
        Call(part, [draw for _, draw in batch])
        for (_, part), draws in sorted(by_call.items(), key=lambda each: each[0])
        for batch in batched(sorted(draws, key=lambda each: each[0]), micro_batch)
    ]


def plan_noised_calls(
    config: Config,
    tree: Tree,
    units: CreditUnits,
    *,
    keep: Tensor,
    trained: Tensor,
    advantages: Tensor,
    group_weight: Tensor,
    ranks: Tensor,
    mixes_levels: bool,
    iteration: int,
) -> Noised:
    """Return the model calls of an iteration's update, and what their losses need.

    `keep` and `mixes_levels` as in `calls_of`. `units` are the U credit units of the tree, with a mask `trained` (U,) of
    those in the update, their `advantages` (U,), and the factor `group_weight` (U,) of the loss of each unit's group.
    `ranks` as in `Noised`.
    """
    likelihood, address = config.algorithm.likelihood, (config.run.seed, "elbo", iteration)
    assert isinstance(likelihood, Elbo)
    return Noised(
        likelihood=likelihood,
        tree=tree,
        calls=calls_of(
            likelihood,
            tree,
            units,
            keep=keep,
            trained=trained,
            micro_batch=config.train.update_rows,
            mixes_levels=mixes_levels,
            address=address,
        ),
        advantages=units.to_edges(advantages),
        weights=units.to_edges(units.weight),
        factors=units.to_edges(group_weight),
        ranks=ranks,
        address=address,
    )


@dataclass(kw_only=True)
class Matching:
    """The losses of one optimizer step on noised samples; see `losses`.

    If the objective couples samples, a first pass computes the log-probability of each draw under the anchor
    (`anchored`). For samples coupled in a group it also computes the loss's derivative by each draw's log-probability
    (`coefficients`) and the loss of each draw's group (`shares`). For samples coupled in an optimizer step it computes
    the means of log ratio and optimality (`centre`).
    """

    policy: Policy
    weights: Weights
    objective: PolicyGradient
    noised: Noised
    beta: float
    anchored: dict[Draw, Tensor] = field(default_factory=dict)
    coefficients: dict[Draw, Tensor] = field(default_factory=dict)
    shares: dict[Draw, Tensor] = field(default_factory=dict)
    centre: tuple[float, float] = ABSENT

    def losses(self, part: int, stats: UpdateStats, sum_shards: Sum) -> Iterator[Tensor]:
        """Yield for each call of a part the weighted sum of its losses."""
        if self.objective.couples != "nothing":
            self._couple(part, sum_shards)
        for call in self.noised.of_part(part):
            yield self._loss(call, stats)

    def _loss(self, call: Call, stats: UpdateStats) -> Tensor:
        likelihood = self.noised.likelihood
        inputs = self._inputs(call)
        loss = self.objective.loss(inputs)
        measured = torch.stack([self.shares[draw] for draw in call.draws]) if self.shares else loss
        divergence = self.objective.divergence(inputs) if self.beta > 0 else None
        if divergence is not None:
            loss = loss + self.beta * divergence
        edges = [draw.edge for draw in call.draws]
        weight = self.noised.weights[edges] * self.noised.factors[edges]
        stats.measure(
            inputs.log_prob - inputs.old_log_prob,
            self.objective.clipped(inputs),
            self.objective.above(inputs),
            divergence=divergence,
            loss=measured,
            exact=likelihood.anchor == "old" and likelihood.old.copies,
            anchored=likelihood.anchor != "live",
        )
        return (loss * weight.to(loss)).sum()

    def _inputs(self, call: Call) -> LossInputs:
        likelihood, rows = self.noised.likelihood, self.noised.rows(call)
        state, target = self.noised.noised(call)
        score = partial(likelihood.log_prob, sigma=call.sigma)
        names = self.objective.policies
        if not self.anchored and likelihood.anchor != "live":
            names = names | {likelihood.anchor}
        others: dict[str, Any] = {name: self._error(name, call, state, target) for name in sorted(names)}
        error = flatten_state(self.policy.velocity(state, call.sigma, rows)) - target
        anchor_error = error.detach() if likelihood.anchor == "live" else others.get(likelihood.anchor, ABSENT)
        log_prob, coefficient = score(error), ABSENT
        if self.coefficients:
            coefficient = torch.stack([self.coefficients[draw] for draw in call.draws])
        if self.anchored:
            old = torch.stack([self.anchored[draw] for draw in call.draws])
        else:
            old = log_prob.detach() if likelihood.anchor == "live" else score(others[likelihood.anchor])
        return LossInputs(
            log_prob=log_prob,
            old_log_prob=old,
            advantage=self.noised.advantages[[draw.edge for draw in call.draws]].to(log_prob),
            error=error,
            anchor_error=anchor_error,
            old_error=others.get("old", ABSENT),
            reference_error=others.get("reference", ABSENT),
            score=score,
            coefficient=coefficient,
            centre=self.centre,
        )

    @torch.no_grad()
    def _error(self, name: str, call: Call, state: State, target: Tensor) -> Tensor:
        """Return velocity minus target (B, D) under the named policy, without gradient."""
        with self.weights.policy(name):
            return flatten_state(self.policy.velocity(state, call.sigma, self.noised.rows(call))) - target

    @torch.no_grad()
    def _couple(self, part: int, sum_shards: Sum) -> None:
        """Compute the log ratios of a part without gradient, and from them `coefficients` and `shares`, or `centre`."""
        ratios: dict[Draw, Tensor] = {}
        likelihood = self.noised.likelihood
        for call in self.noised.of_part(part):
            state, target = self.noised.noised(call)
            live, anchor = (
                likelihood.log_prob(self._error(name, call, state, target), call.sigma)
                for name in ("live", likelihood.anchor)
            )
            ratios |= dict(zip(call.draws, live - anchor, strict=True))
            self.anchored |= dict(zip(call.draws, anchor, strict=True))
        if self.objective.couples == "step":
            self._centre(ratios, sum_shards)
            return
        self.coefficients = {draw: 0 * ratio for draw, ratio in ratios.items()}
        self.shares = dict(self.coefficients)
        together = defaultdict(list)
        for draw in ratios:
            together[self.noised.node(draw).root.group, draw.number, draw.sign].append(draw)
        assert isinstance(self.objective, Coupled)
        for draws in together.values():
            if len(draws) > 1:
                ell = torch.stack([ratios[draw] for draw in draws])
                advantage = self.noised.advantages[[draw.edge for draw in draws]].to(ell)
                rank = self.noised.ranks[[draw.leaf for draw in draws]].to(ell)
                share = self.objective.group_loss(ell, advantage, rank)
                for draw, coefficient in zip(draws, self.objective.coefficients(ell, advantage, rank), strict=True):
                    self.coefficients[draw], self.shares[draw] = coefficient, share

    def _centre(self, ratios: dict[Draw, Tensor], sum_shards: Sum) -> None:
        self.weights.lockstep.join()  # before the next collective
        assert isinstance(self.objective, Centred)
        good = optimality(self.noised.advantages[[draw.edge for draw in ratios]].double(), self.objective.most)
        log_ratios = torch.stack(list(ratios.values())).double().cpu() if ratios else good
        sums = torch.stack([log_ratios.sum(), good.sum(), torch.tensor(float(len(ratios)), dtype=torch.float64)])
        ratio, good, count = sum_shards(sums).tolist()
        self.centre = ratio / max(count, 1.0), good / max(count, 1.0)
