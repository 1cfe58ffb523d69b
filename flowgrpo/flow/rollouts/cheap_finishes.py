"""Finishing trees cheaply, and measuring what that does to the order of siblings.

In the first iteration, and as often as `tree.finish.check` says, the trees of the first group are grown once more from the
same noise and finished exactly: by all the steps and the network as it is. Both are decoded and scored, and what the credit
compares is ranked by either. The random numbers of the run are not touched.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from flowgrpo.data.prompts import Row
from flowgrpo.errors import InputError
from flowgrpo.flow.config import Algorithm, Config
from flowgrpo.flow.pipeline.policy import Policy
from flowgrpo.flow.rollouts.draft_rollout import spearman
from flowgrpo.flow.rollouts.rollout import Finished, Pair, score_leaves, walk
from flowgrpo.flow.rollouts.state_preview import Foretold
from flowgrpo.training.advantages.baseline import combined
from flowgrpo.training.advantages.credit_units import CreditUnits
from flowgrpo.training.advantages.reward_combination import Combination
from flowgrpo.training.distributed.assignment import Assignment
from flowgrpo.training.distributed.data_share import WHOLE, DataShard
from flowgrpo.training.reports.metrics import mean
from flowgrpo.training.run.random_states import random_state_kept
from flowgrpo.training.scoring.group_scores import Gather
from flowgrpo.training.scoring.scorer import Scores, unheard
from flowgrpo.training.weights.low_precision_copies import Copies
from rewards import Reward
from samplers.finishes import Finish
from samplers.kernels import Kernel, State
from samplers.trees import Tree

FIRST = 0  # the group that is compared


def check_policy(config: Config, policy: Policy) -> None:
    """Refuse cheap finishes of a policy, once started, whose pipeline takes its steps one by one.

    Raises:
        InputError: it does.
    """
    finish = getattr(config.algorithm.tree, "finish", None)
    if policy.pins and finish is not None and finish.cheap:
        raise InputError(
            "algorithm.tree.finish: this pipeline pins a part of what it samples, so its steps are taken one by one; take a "
            "number of steps, or null"
        )


class Finishing:
    """How a run finishes its trees; what `samplers.finishes` calls, where that is not by the policy as it is.

    Attributes:
        cheap: whether other numbers come out than the network's own.

    Args:
        copies: of the policy's layers, in low precision.
        credited: the rewards that are trained on.
    """

    def __init__(self, config: Config, policy: Policy, copies: Copies, credited: Combination):
        self._config, self._policy, self._copies, self._credited = config, policy, copies, credited
        self._asked = getattr(config.algorithm.tree, "finish", None)
        self.cheap = self._asked is not None and self._asked.cheap

    def __call__(self, state: State, sigmas: Sequence[float], rows: Sequence[Row]) -> State:
        """Where ODE steps take a state, by the copy that is asked for."""
        with self._copies.finishing():
            return self._policy.finish(state, sigmas, rows)

    def over(self, watched: Foretold | None) -> Finish | None:
        """What is handed to growth; None where the policy finishes as it walks.

        Args:
            watched: what stands for the policy's velocity, where its trees are kept to be looked at.
        """
        if not self.cheap:
            return None
        return self if watched is None else watched.passing(self)

    def finished(self, algorithm: Algorithm, tree: Tree, scores: Scores, **options: Any) -> Finished | None:
        """What is known of an iteration's finishes; None where they are the policy's own. Arguments as of `compare`."""
        if not self._due(options["iteration"]):
            return Finished({}) if self.cheap else None
        return self.compare(algorithm, tree, scores, **options)

    def _due(self, iteration: int) -> bool:
        every = 0 if self._asked is None else self._asked.every
        return every > 0 and iteration >= 0 and iteration % every == 0

    def compare(
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
        share: DataShard = WHOLE,
    ) -> Finished:
        """Grow this process's trees of the first group again, finish them exactly, and return what either says of siblings.

        Args:
            algorithm: the axes, with the tree in the shape that it has.
            tree: of this process, finished as the run does.
            scores: of its leaves.
            kernels: of the steps.
            micro_batch: rows in one call of the model.
            assignment, gather, share: see `score_pieces`.
        """
        train, run, policy = self._config.train, self._config.run, self._policy
        roots = [node.root for node in tree.nodes if node.parent is None and node.root.group == FIRST]
        before = policy.evaluations
        of_group = Assignment(
            [[member for member in hand if member[0] == FIRST] for hand in assignment.hands], assignment.process
        )
        if not roots:
            if FIRST in of_group.divided and any(reward.group_wise for reward in rewards):
                gather([])  # as often as those gather that score the group together
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

        def decode(leaves: Sequence[int], rows: Sequence[Row]) -> torch.Tensor:
            return policy.decode(tuple(x[list(leaves)] for x in again.samples), rows)

        with random_state_kept(), unheard():
            exactly = score_leaves(again, decode, rewards, micro_batch, assignment=of_group, gather=gather, share=share)
        found = self._values(exact, again, exactly)
        siblings = self._values(algorithm, tree, scores)
        return Finished(
            {"cost/check_evaluations": policy.evaluations - before},
            [Pair(own, value, found[key][1]) for key, (own, value) in siblings.items() if key in found],
            len(again.leaves),
        )

    def _values(
        self, algorithm: Algorithm, tree: Tree, scores: Scores
    ) -> Mapping[tuple[tuple[int, ...], int], tuple[tuple[int, ...], float]]:
        """What each unit of the first group is compared by, and its value, by the path and the step of its first node."""
        units: CreditUnits = algorithm.credit.units(tree, self._credited.columns(scores.values), self._credited.weights)
        values = combined(units.values, self._credited.weights)
        found = {}
        for node, unit in reversed(list(enumerate(units.of_edge.tolist()))):
            if unit >= 0 and tree.nodes[node].root.group == FIRST:
                found[unit] = (tree.nodes[node].path, tree.nodes[node].step)
        compared = {key: (tuple(units.comparison[unit].tolist()), float(values[unit])) for unit, key in found.items()}
        return dict(sorted(compared.items()))


def agreement(pairs: Sequence[Pair]) -> dict[str, float | None]:
    """How cheap finishes rank siblings, as a metric: None where no siblings are ranked by both.

    `finish/rank_agreement` is Spearman's correlation of their values with those of exact finishes, the mean over the sets
    that are compared. Values of which one was lost are left out.
    """
    sets = defaultdict(list)
    for pair in pairs:
        sets[pair.siblings].append((pair.cheap, pair.exact))
    values = [torch.tensor(own, dtype=torch.float64) for _, own in sorted(sets.items())]
    ranked = [spearman(*own[own.isfinite().all(1)].unbind(1)) for own in values]
    return {"finish/rank_agreement": mean(torch.tensor(ranked, dtype=torch.float64))}
