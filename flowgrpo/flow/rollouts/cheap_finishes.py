"""Cheap finishes (few or low-precision ODE steps at a branch's end), and a check of their effect on sibling order.

The check runs in the first iteration and every `tree.finish.check` iterations. It grows the trees of the first group
again from the same noise and finishes them exactly: with all remaining ODE steps, by the network itself. Both results are
decoded and scored, and the credit units are ranked by either reward. The random numbers of the run do not change.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch

from flowgrpo.data.prompts import Row
from flowgrpo.errors import InputError
from flowgrpo.flow.config import Algorithm, Config
from flowgrpo.flow.pipeline.policy import Policy
from flowgrpo.flow.rollouts.draft_rollout import spearman
from flowgrpo.flow.rollouts.rollout import Finished, Pair, score_leaves, walk
from flowgrpo.flow.rollouts.state_preview import EstimateRecorder
from flowgrpo.training.advantages.baseline import weighted_sum
from flowgrpo.training.advantages.credit_units import CreditUnits
from flowgrpo.training.advantages.reward_combination import Combination
from flowgrpo.training.distributed.assignment import Assignment
from flowgrpo.training.distributed.data_shard import WHOLE, DataShard
from flowgrpo.training.reports.metrics import mean
from flowgrpo.training.run.random_states import preserve_random_state
from flowgrpo.training.scoring.group_scores import Gather
from flowgrpo.training.scoring.scorer import Scores, unheard
from flowgrpo.training.weights.low_precision_copies import Copies
from rewards import Reward
from rewards.audio import Films
from samplers.growth import Finish
from samplers.kernels import Kernel, State
from samplers.trees import Tree

FIRST = 0  # the group that a check finishes twice


def check_policy(config: Config, policy: Policy) -> None:
    """Raise InputError for cheap finishes with a pipeline that overwrites a part of its samples (masked editing)."""
    finish = getattr(config.algorithm.tree, "finish", None)
    if policy.pins and finish is not None and finish.cheap:
        raise InputError(
            "algorithm.tree.finish: this pipeline pins a part of what it samples, so its steps are taken one by one; take a "
            "number of steps, or null"
        )


class Finishing:
    """A `samplers.growth.Finish` that takes ODE steps with low-precision copies of the policy's layers."""

    def __init__(self, config: Config, policy: Policy, copies: Copies, credited: Combination):
        self._config, self._policy, self._copies, self._credited = config, policy, copies, credited
        self._settings = getattr(config.algorithm.tree, "finish", None)
        self.cheap = self._settings is not None and self._settings.cheap

    def __call__(self, state: State, sigmas: Sequence[float], rows: Sequence[Row]) -> State:
        """Return the state after ODE steps over `sigmas` with the low-precision copies."""
        with self._copies.finishing():
            return self._policy.finish(state, sigmas, rows)

    def over(self, watched: EstimateRecorder | None) -> Finish | None:
        """Return the finish to grow trees with, recorded by `watched` if given; None if finishes are not cheap."""
        if not self.cheap:
            return None
        return self if watched is None else watched.recording(self)

    def finished(
        self,
        algorithm: Algorithm,
        tree: Tree,
        scores: Scores,
        *,
        kernels: Sequence[Kernel],
        rewards: Sequence[Reward],
        micro_batch: int,
        iteration: int,
        assignment: Assignment,
        gather: Gather,
        shard: DataShard = WHOLE,
    ) -> Finished | None:
        """Return statistics of an iteration's finishes; None if they are not cheap and no check is due.

        If a check is due, this process's trees of the first group are grown again and finished exactly. `algorithm` has
        the tree in its current shape; `tree` and `scores` are those of this process's rollout.
        """
        every = 0 if self._settings is None else self._settings.every
        if not every or iteration < 0 or iteration % every:
            return Finished({}) if self.cheap else None
        train, run, policy = self._config.train, self._config.run, self._policy
        roots = [node.root for node in tree.nodes if node.parent is None and node.root.group == FIRST]
        before = policy.evaluations
        of_group = Assignment(
            [[member for member in own if member[0] == FIRST] for own in assignment.by_process], assignment.process
        )
        if not roots:
            if FIRST in of_group.divided and any(reward.group_wise for reward in rewards):
                gather([])  # twice, as the processes that score the group do
                gather([])
            return Finished({"cost/check_evaluations": 0}, [])
        exact = algorithm.model_copy(update={"tree": algorithm.tree.exact})
        again = walk(
            policy,
            exact.plan(kernels, train.group_size, run.seed, iteration),
            roots,
            micro_batch=micro_batch,
            seed=run.seed,
            iteration=iteration,
        )

        def decode(leaves: Sequence[int], rows: Sequence[Row]) -> torch.Tensor | Films:
            return policy.decode(tuple(x[list(leaves)] for x in again.samples), rows)

        with preserve_random_state(), unheard():
            exactly = score_leaves(again, decode, rewards, micro_batch, assignment=of_group, gather=gather, shard=shard)
        exact_values = self._values(exact, again, exactly)
        pairs = [
            Pair(siblings, value, exact_values[key][1])
            for key, (siblings, value) in self._values(algorithm, tree, scores).items()
            if key in exact_values
        ]
        return Finished({"cost/check_evaluations": policy.evaluations - before}, pairs, len(again.leaves))

    def _values(
        self, algorithm: Algorithm, tree: Tree, scores: Scores
    ) -> Mapping[tuple[tuple[int, ...], int], tuple[tuple[int, ...], float]]:
        """Return (comparison set, value) of each unit of the first group, keyed by (path, step) of the unit's first node."""
        units: CreditUnits = algorithm.credit.units(tree, self._credited.columns(scores.values), self._credited.weights)
        values = weighted_sum(units.values, self._credited.weights)
        first_nodes = {}
        for node, unit in reversed(list(enumerate(units.of_edge.tolist()))):
            if unit >= 0 and tree.nodes[node].root.group == FIRST:
                first_nodes[unit] = (tree.nodes[node].path, tree.nodes[node].step)
        compared = {
            key: (tuple(units.comparison[unit].tolist()), float(values[unit])) for unit, key in first_nodes.items()
        }
        return dict(sorted(compared.items()))


def agreement(pairs: Sequence[Pair]) -> dict[str, float | None]:
    """Return metrics of how well cheap values replace exact ones, as means over the sets of siblings; None without any.

    `finish/rank_agreement` is Spearman's correlation of both values. `finish/reward_drift` is the mean absolute difference
    over the standard deviation of the exact ones. Units with a lost reward are left out, and sets of equal exact values.
    """
    sets = defaultdict(list)
    for pair in pairs:
        sets[pair.siblings].append((pair.cheap, pair.exact))
    values = [torch.tensor(members, dtype=torch.float64) for _, members in sorted(sets.items())]
    known = [members[members.isfinite().all(1)].unbind(1) for members in values]
    drifts = [
        (cheap - exact).abs().mean() / exact.std(correction=0) for cheap, exact in known if len(exact.unique()) > 1
    ]
    return {
        "finish/rank_agreement": mean(torch.tensor([spearman(*pair) for pair in known], dtype=torch.float64)),
        "finish/reward_drift": mean(torch.tensor(drifts, dtype=torch.float64)),
    }
