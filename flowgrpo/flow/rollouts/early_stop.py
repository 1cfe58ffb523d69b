"""Early stop: a rollout's chains are judged by a clean estimate at one step, and some are not sampled to the end.

The estimates x - sigma v are of the evaluation that every chain has anyway, so judging costs decoded samples and rewards
but no model evaluation. The draws have addresses, so a resumed run stops the same chains. Survivors weigh 1 / chance in
the loss and in the baseline (`training.advantages.comparison_sets.weighted_leave_one_out`), and the divisor of the loss
counts stopped chains too, so that the expected gradient is that of a rollout without stops.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import cast

import torch

from flowgrpo.errors import InputError
from flowgrpo.flow.config import Config
from flowgrpo.flow.methods.trees.stopping import Stop, survival_chances, survivors
from flowgrpo.flow.pipeline.policy import Policy
from flowgrpo.flow.rollouts.draft_rollout import spearman
from flowgrpo.flow.rollouts.state_preview import EstimateRecorder, estimates_by_node
from flowgrpo.training.advantages.baseline import weighted_sum
from flowgrpo.training.advantages.comparison_sets import Survival, complete
from flowgrpo.training.advantages.credit_units import CreditUnits
from flowgrpo.training.advantages.reward_combination import Combination
from flowgrpo.training.distributed.assignment import Member
from flowgrpo.training.reports.metrics import mean
from flowgrpo.training.run.random_states import preserve_random_state
from flowgrpo.training.scoring.group_scores import Piece, score_pieces
from flowgrpo.training.scoring.scorer import unheard
from flowgrpo.training.state import RunState
from rewards import Reward
from rewards.audio import join_samples
from samplers.batches import batched
from samplers.growth import trained_steps
from samplers.kernels import State
from samplers.trees import Evaluate, Plan, Root, Tree, stack_states

Tensor = torch.Tensor


@dataclass(frozen=True)
class Stopped:
    """The early stop of a rollout with N chains.

    Attributes:
        nodes: node of each chain at the step before which chains stop.
        weight: (N,) 1 over the chain's chance to go on, 0 if it was stopped.
        foretold: (N, R) rewards of the clean estimates; NaN where a reward does not apply.
        edges: number of trained edges of a whole chain.
        saved: model evaluations of the steps that a stopped chain does not take.
    """

    nodes: Sequence[int]
    weight: Tensor
    foretold: Tensor
    _: KW_ONLY
    edges: int
    saved: int

    def extend(self, units: CreditUnits, tree: Tree, combination: Combination) -> CreditUnits:
        """Return the units of the survivors and, after them, units without rewards for the stopped chains."""
        places = self._places(tree)
        keys = zip(units.comparison[:, 0].tolist(), units.root.tolist(), strict=True)
        stopped = (self.weight == 0).nonzero()[:, 0].tolist()
        order = [*(places[key] for key in keys), *stopped]
        roots = [tree.nodes[self.nodes[place]].root for place in stopped]
        of_edge = units.of_edge.clone()
        for unit, place in enumerate(stopped, start=len(units.values)):
            of_edge[tree.ancestry(self.nodes[place])] = unit
        groups, indices = ([getattr(root, name) for root in roots] for name in ("group", "index"))
        return replace(
            units,
            values=torch.cat([units.values, units.values.new_full((len(stopped), units.values.shape[1]), torch.nan)]),
            comparison=torch.cat([units.comparison, torch.tensor(groups, dtype=torch.long)[:, None]]),
            weight=torch.cat([units.weight, torch.ones(len(stopped), dtype=torch.float64)]),
            of_edge=of_edge,
            root=torch.cat([units.root, torch.tensor(indices, dtype=torch.long)]),
            survival=Survival(self.weight[order], combination.columns(self.foretold)[order]),
        )

    def outcomes(self, tree: Tree, rewards: Tensor, ends: Sequence[Root]) -> tuple[Tensor, list[Member]]:
        """Return unbiased rewards (N, R) of all chains and the root of each, given rewards of the chains that ended.

        The mean over the draws of `complete` is the reward that the chain would have had.
        """
        places = self._places(tree)
        values = torch.full_like(self.foretold, torch.nan)
        values[[places[root.group, root.index] for root in ends]] = rewards
        roots = [tree.nodes[node].root for node in self.nodes]
        return complete(values, self.weight[:, None], self.foretold), [(root.group, root.index) for root in roots]

    def missing(self, tree: Tree) -> dict[int, float]:
        """Return for each part of the update the weight of the trained edges of its stopped chains."""
        parts = [tree.nodes[node].root.part for node in self.nodes]
        count = Counter(part for part, weight in zip(parts, self.weight.tolist(), strict=True) if weight == 0)
        return {part: float(number * self.edges) for part, number in count.items()}

    @property
    def counts(self) -> dict[str, int]:
        """Return counts for the metrics: stopped chains, scored estimates, and evaluations that the rollout saved."""
        stopped, foretold = int((self.weight == 0).sum()), len(self.nodes)
        return {"cost/stopped": stopped, "cost/foretold": foretold, "cost/saved_evaluations": stopped * self.saved}

    def _places(self, tree: Tree) -> dict[tuple[int, int], int]:
        roots = [tree.nodes[node].root for node in self.nodes]
        return {(root.group, root.index): place for place, root in enumerate(roots)}


def check_rewards(config: Config, rewards: Sequence[Reward]) -> None:
    """Raise InputError if a reward compares the samples of a group, of which stopped chains would be missing."""
    compares = next((reward.name for reward in rewards if reward.group_wise), None)
    if config.algorithm.stop is not None and compares is not None:
        raise InputError(
            f"rewards: {compares} compares the samples of a group, of which algorithm.tree.stop leaves some out; take "
            "algorithm.tree.stop=null"
        )


def begin(
    run: RunState, plan: Plan, roots: Sequence[Root], *, iteration: int, evaluate: Evaluate | None
) -> EarlyStop | None:
    """Return the early stop of the chains of an iteration from `roots`; None if the config has none.

    `evaluate` is the velocity function to grow trees with; None: the policy's.
    """
    stop = cast("Config", run.config).algorithm.stop
    if stop is None:
        return None
    edges = len(trained_steps(plan, run.policy.sigmas))
    return EarlyStop(run, stop, roots, iteration=iteration, edges=edges, evaluate=evaluate)


class EarlyStop:
    """The early stop of one rollout, a `samplers.trees.Gate`; whole groups are on one process.

    Attributes:
        evaluate: the velocity function to grow trees with, which records the clean estimates.
        stopped: the result; None until the trees have grown to the step.
    """

    def __init__(
        self, run: RunState, stop: Stop, roots: Sequence[Root], *, iteration: int, edges: int, evaluate: Evaluate | None
    ):
        self._run, self._stop, self._edges = run, stop, edges
        self._policy: Policy = run.policy
        self._address, self._before = (run.config.run.seed, "stop", iteration), self._policy.evaluations
        judged = (self._policy.sigmas[stop.step - 1],)
        self.evaluate = EstimateRecorder(evaluate or self._policy.velocity, [root.row for root in roots], judged)
        self.stopped: Stopped | None = None

    def __call__(self, tree: Tree, nodes: list[int]) -> Sequence[int]:
        """Return the nodes that grow on: all of them, except at the step before which chains stop."""
        if tree.nodes[nodes[0]].step != self._stop.step:
            return nodes
        by_group = defaultdict(list)
        for place, node in enumerate(nodes):
            by_group[tree.nodes[node].root.group].append(place)
        foretold = self._foretell(tree, nodes, by_group)
        total = self._run.credited.total(foretold)
        chances = torch.empty(len(nodes), dtype=torch.float64)
        for places in by_group.values():
            chances[places] = survival_chances(total[places], self._stop.keep, self._stop.floor)
        alive = survivors(chances, [(*self._address, root.group, root.index) for root in _roots(tree, nodes)])
        weight = torch.where(alive, 1 / chances, 0.0)
        rows = sum(len(evaluation.rows) for evaluation in tree.evaluations)
        of_step = (self._policy.evaluations - self._before) // rows  # guidance may take several evaluations
        saved = of_step * (len(tree.sigmas) - 1 - self._stop.step)
        self.stopped = Stopped(nodes, weight, foretold, edges=self._edges, saved=saved)
        return [node for node, goes_on in zip(nodes, alive.tolist(), strict=True) if goes_on]

    def _foretell(self, tree: Tree, nodes: Sequence[int], by_group: dict[int, list[int]]) -> Tensor:
        """Return the rewards (N, R) of the clean estimates; a lost one is replaced by the mean of its group."""
        estimates, config = estimates_by_node(tree, self.evaluate), cast("Config", self._run.config)
        device = self.evaluate.device
        self.evaluate.by_call.clear()

        def pieces() -> Iterator[Piece]:
            for group, places in by_group.items():
                # In the order of their roots, so that no batch of a group depends on the batches of the rollout.
                places.sort(key=lambda place: tree.nodes[nodes[place]].path)
                rows = [tree.nodes[nodes[place]].root.row for place in places]
                parents = [tree.nodes[nodes[place]].parent for place in places]
                states: list[State] = [estimates[parent] for parent in parents if parent is not None]
                size = config.train.rollout_rows
                samples = [
                    self._policy.decode(tuple(x.to(device) for x in stack_states(batch)), own)
                    for batch, own in zip(batched(states, size), batched(rows, size), strict=True)
                ]
                yield Piece(group, places, join_samples(samples), rows)

        with preserve_random_state(), unheard():
            values = score_pieces(self._run.rewards, pieces(), shard=self._run.shard).values
        order = torch.tensor([place for places in by_group.values() for place in places])
        foretold = values[order.argsort()]
        for places in by_group.values():
            known = foretold[places]
            foretold[places] = known.where(known.isfinite(), known.nanmean(0))
        return foretold


def agreement(units: CreditUnits, reward_weights: Tensor) -> dict[str, float | None]:
    """Return the metric `stop/rank_agreement`: Spearman's correlation of foretold and final rewards of survivors.

    It is the mean over groups, None without any. `units` are those of all processes.
    """
    assert units.survival is not None
    pairs = torch.stack([weighted_sum(x, reward_weights) for x in (units.survival.foretold, units.values)], 1)
    known, groups = pairs.isfinite().all(1), units.comparison[:, 0]
    correlations = [spearman(*pairs[known & (groups == group)].unbind(1)) for group in groups.unique()]
    return {"stop/rank_agreement": mean(torch.tensor(correlations))}


def _roots(tree: Tree, nodes: Sequence[int]) -> list[Root]:
    return [tree.nodes[node].root for node in nodes]
