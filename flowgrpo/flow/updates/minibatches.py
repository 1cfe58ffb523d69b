"""The optimizer steps of an iteration: the credit of its edges or samples, and one optimizer step for each part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

import torch
from typing_extensions import override

from flowgrpo.data.prompts import Row
from flowgrpo.flow.config import Config
from flowgrpo.flow.offline.bank_samples import find_losers, resample, root_of
from flowgrpo.flow.pipeline import guidance
from flowgrpo.flow.pipeline.policy import Policy
from flowgrpo.flow.rollouts.rollout import Batch
from flowgrpo.flow.updates import rollout_graphs
from flowgrpo.flow.updates.noised import Paths, find_finite, plan_noised_calls, select_samples
from flowgrpo.flow.updates.replay import build_replay_tree
from flowgrpo.flow.updates.tree_record import build_kept_trees
from flowgrpo.flow.updates.update import Credited
from flowgrpo.training.advantages.credit_units import CreditUnits
from flowgrpo.training.advantages.group_options import rank_index
from flowgrpo.training.fitting.batch_sizes import ROLLOUT
from flowgrpo.training.prompts.prompt_groups import Groups
from flowgrpo.training.reports.tree_store import KeptTree
from flowgrpo.training.state import RunState
from flowgrpo.training.weights.optimizer_step import UpdateStats
from flowgrpo.training.wing import Compared, Minibatches
from samplers.trees import Tree

RowAt = Callable[[int, Groups, int, int], Row]  # (iteration, its groups, group, start) -> row


class FlowMinibatches(Minibatches):
    """The optimizer steps of an iteration, one for each part of its edges or samples.

    `credit` returns the edges or samples of all parts, with advantages and weights. `take_step` gets a part's number.
    """

    sized_by = ROLLOUT

    def __init__(
        self,
        run: RunState,
        batch: Batch,
        credit: Callable[[], Credited],
        take_step: Callable[[Credited, int], UpdateStats],
    ):
        self._run, self._batch, self._credit, self._take_step = run, batch, credit, take_step
        self._credited: Credited | None = None
        self._counted = False  # whether the model evaluations of `prepare` are counted

    @override
    def prepare(self) -> None:
        if self._credited is None:
            evaluations = self._run.evaluations
            self._credited = self._credit()
            if self._counted:
                self._run.evaluations = evaluations
            self._counted = True

    @override
    def forget(self) -> None:
        self._credited = None
        rollout_graphs.drop(self._batch.tree.evaluations)

    @override
    def __len__(self) -> int:
        return self._run.config.train.updates

    @override
    def tree_records(self) -> list[KeptTree]:
        run, config = self._run, cast("Config", self._run.config)
        assert self._credited is not None, "it is prepared"
        return build_kept_trees(
            config, run.credited, self._batch, self._credited, iteration=run.done, names=run.reward_names
        )

    @override
    def step(self, number: int) -> UpdateStats:
        assert self._credited is not None, "it is prepared"
        return self._take_step(self._credited, number)


def credit_edges(run: RunState, policy: Policy, batch: Batch, compared: Compared, *, row_at: RowAt) -> Credited:
    """Return the edges that the update replays, or the samples that it scores, with their advantages and weights.

    `row_at` returns a start's row; it is used only if a snapshot (policy `bank`) samples that start again.
    """
    config, tree = cast("Config", run.config), batch.tree
    algorithm = config.algorithm
    known = compared.units.values.isfinite().any(1)
    units = replace(compared.units, weight=compared.units.weight.where(known, 0.0))  # a lost sample weighs nothing
    if algorithm.likelihood.name == "elbo":
        trained = compared.trained & known
        return _build_noised(run, policy, batch, units, advantages=compared.advantages, trained=trained, row_at=row_at)
    factor = batch.groups.weights[units.comparison[:, 0]]
    return Credited(
        tree=build_replay_tree(
            config,
            tree,
            units=units,
            advantages=compared.advantages.where(known, torch.nan),
            trained=compared.trained,
            iteration=run.done,
        ),
        units=units,
        advantages=compared.advantages,
        step_weights=algorithm.objective.weights(tree.trained_steps, tree.sigma_cap),
        beta=run.beta,
        group_weight=factor if units.survival is None else factor * units.survival.weight,
        stopped={} if batch.stopped is None else batch.stopped.missing(tree),
        correction=None if batch.engine is None else batch.engine.correction,
    )


def _build_noised(
    run: RunState,
    policy: Policy,
    batch: Batch,
    units: CreditUnits,
    *,
    advantages: torch.Tensor,
    trained: torch.Tensor,
    row_at: RowAt,
) -> Credited:
    """Return the samples that the update scores with `likelihood: elbo`, with their advantages and weights."""
    config, tree = cast("Config", run.config), batch.tree
    ends = Paths(tree, units).last_edges()
    keep, of_leaves = (units.to_edges(each.double())[ends] for each in (trained, advantages))
    keep = select_samples(config.algorithm.objective, tree, of_leaves, (keep > 0) & find_finite(tree))
    if batch.stored and config.algorithm.sampler == "bank":
        leaves = find_losers(tree, of_leaves, keep)
        tree = _with_samples_of_bank(run, policy, batch, leaves, row_at=row_at)
        keep &= find_finite(tree)
    weight = batch.groups.weights[units.comparison[:, 0]]
    rows = [root_of(tree, leaf).row for leaf in range(len(tree.leaves))[:1]]
    mixes = bool(rows) and guidance.mixes_levels(config.model.guidance, policy, rows)
    ranking = rank_index(config.algorithm.objective, run.reward_names)
    return Credited(
        tree=tree,
        units=units,
        advantages=advantages,
        step_weights={},
        beta=run.beta,
        group_weight=weight,
        noised=plan_noised_calls(
            config,
            tree,
            units,
            keep=keep,
            trained=trained,
            advantages=advantages,
            group_weight=weight,
            ranks=torch.zeros(len(tree.leaves)) if ranking is None else batch.scores.values[:, ranking],
            mixes_levels=mixes,
            iteration=run.done,
        ),
    )


def _with_samples_of_bank(run: RunState, policy: Policy, batch: Batch, leaves: Sequence[int], *, row_at: RowAt) -> Tree:
    """Return the tree of stored samples, with the samples of `leaves` replaced by samples of the drawn snapshot."""
    roots = [root_of(batch.tree, leaf) for leaf in leaves]
    rows = [row_at(run.done, batch.groups, root.group, root.index) for root in roots]
    with run.weights.policy("bank"):
        return resample(cast("Config", run.config), policy, batch.tree, leaves, rows=rows, iteration=run.done)
