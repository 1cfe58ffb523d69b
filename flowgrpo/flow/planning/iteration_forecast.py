"""Forecast of an iteration's model evaluations and samples: its real tree is grown on states of one number each."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from itertools import zip_longest

import torch

from flowgrpo.errors import InputError
from flowgrpo.flow.config import Config
from flowgrpo.flow.methods.credit.rules import step_signs
from flowgrpo.flow.methods.trees.adaptive import Adaptive
from flowgrpo.flow.rollouts.hinted_rollout import search_use
from flowgrpo.flow.rollouts.search import compared_steps
from flowgrpo.flow.updates.noised import Paths, calls_of, select_samples
from flowgrpo.flow.updates.replay import build_replay_tree
from flowgrpo.training.advantages import unit_selection
from flowgrpo.training.advantages.credit_units import CreditUnits
from flowgrpo.training.distributed.minibatches import of_roots
from flowgrpo.training.prompts import second_stage
from flowgrpo.training.reports.progress import BACKWARD
from samplers.growth import grow
from samplers.schedule import linear_sigmas
from samplers.trees import Evaluation, Root, Tree


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Counts of one iteration on all processes."""

    rollout: int  # rows through the model in the rollout
    update: int  # rows through the model in the update
    with_gradient: int  # rows of `update` with a backward pass; not those of other policies and of a first pass
    decoded: int  # samples, with those of clean estimates for an early stop
    trained_edges: int
    update_batches: int  # model calls of the update, at least
    level_batches: int = 0  # and if each call has one noise level
    stopped: int = 0  # chains that an early stop is expected to end
    saved: int = 0  # rows through the model that the rollout does not take for them
    graph_rows: tuple[int, ...] = ()  # rows of the first update whose graphs the rollout may keep, at each trained step
    call_rows: int = 0  # rows of the rollout's largest call, if there are graphs

    @property
    def graphs(self) -> int:
        """Rows of the first update whose graphs the rollout may keep."""
        return sum(self.graph_rows)

    def spared(self, steps: int) -> float:
        """Return the fraction of the iteration's passes that the graphs of the first `steps` trained steps spare."""
        return sum(self.graph_rows[:steps]) / (self.rollout + self.update + (BACKWARD - 1) * self.with_gradient)


def predict_cost(config: Config, num_steps: int, iteration: int = 0) -> Cost:
    """Return the cost of an iteration without guidance: each row of a model call counts once.

    The tree gets made-up rewards and is pruned, so choices that do not fit each other or the schedule raise InputError.
    With an early stop the counts are those of its expected number of chains in each group, rounded.
    """
    train, algorithm = config.train, config.algorithm
    replays = train.rollout_rows == train.update_rows  # the update may repeat the rollout's calls
    tree = _grow_tree(config, num_steps, iteration, train.rollout_rows if replays else train.groups * train.group_size)
    if any(not kernel.stochastic for kernel, _, _ in tree.trained_steps):
        raise InputError("algorithm.tree: the plan trains a deterministic step, which has no log-probability")
    finish = getattr(algorithm.tree, "finish", None)
    if finish is not None and finish.cheap and not any(_finishes(e) for e in tree.evaluations):
        raise InputError(
            f"algorithm.tree.finish: no evaluation of this {algorithm.tree.name} is of ODE steps that only lead to a "
            "reward, take null"
        )
    of_samples = algorithm.likelihood.name == "elbo"
    if not tree.leaves or not (of_samples or tree.trained_steps):
        raise InputError("algorithm.tree: the plan trains no step, or leads to no sample")
    rewards, weights = torch.arange(len(tree.leaves), dtype=torch.float64) ** 2, torch.ones(1, dtype=torch.float64)
    units = algorithm.credit.units(tree, rewards[:, None], weights)
    if units.anchor is None and not units.compares:
        raise InputError("algorithm.credit: every edge would be compared with itself alone, which teaches nothing")
    advantages, trained = unit_selection.normalize_advantages(
        units, weights, past=None, baseline=algorithm.baseline, select=train.select, done=train.done_at(iteration)
    )
    stop, stopped, saved = algorithm.stop, 0, 0
    if stop is not None:
        ended = units.root >= round(stop.keep * train.group_size)
        stopped, trained = int(ended.sum()), trained & ~ended
        saved = stopped * (num_steps - stop.step)
    algorithm.objective.weights(tree.trained_steps, tree.sigma_cap)
    if algorithm.kernel.calibrate is not None:
        _check_calibration(tree, rewards)
    algorithm.tree.check(tree)
    if of_samples:
        ends = Paths(tree, units).last_edges()
        keep = units.to_edges(trained.double())[ends] > 0
        keep = select_samples(algorithm.objective, tree, units.to_edges(advantages)[ends], keep)
        return _of_samples(config, tree, units, keep=keep, trained=trained)
    replay_tree = build_replay_tree(
        config, tree, units=units, advantages=torch.zeros(len(units.values)), trained=trained, iteration=iteration
    )
    evaluations = [e for e in replay_tree.evaluations if e.trained]
    forwards = sum(len(e.rows) for e in evaluations)
    states = forwards // train.groups
    if train.split == "edges" and states < train.updates:
        raise InputError(
            f"train.updates: {train.updates} parts, but the trained edges of a group leave {states} states, take {states}"
        )
    scored_first = [e for e in evaluations if algorithm.objective.span == "trajectory" and config.moved(e.part)]
    first = [] if config.graph_hindrance else [e for e in evaluations if e.part == 0]
    at_sigmas = Counter(e.sigma for e in first for _ in e.rows)
    return Cost(  # edges that an engine sampled are only scored here
        rollout=sum(len(e.rows) for e in tree.evaluations if e.trained or config.run.engine is None) - saved,
        update=forwards * (2 if algorithm.objective.kl.beta > 0 else 1) + sum(len(e.rows) for e in scored_first),
        with_gradient=forwards,
        decoded=len(tree.leaves) * (1 if stop is None else 2) - stopped,
        stopped=stopped,
        saved=saved,
        trained_edges=sum(len(edges.nodes) for e in evaluations for edges in e.trained),
        update_batches=len(evaluations),
        graph_rows=tuple(at_sigmas[sigma] for sigma in sorted(at_sigmas, reverse=True)),
        call_rows=max(len(e.rows) for e in tree.evaluations) if first else 0,
    )


def most_graphs(config: Config, num_steps: int, done: int = 0) -> Cost:
    """Return the cost of the iteration with the most kept graphs: the next, the middle or the last iteration.

    A tree that changes during a run, such as BranchGRPO-Mix's, has the most kept graphs at the beginning or the end. Each
    of `graph_rows` is the most of the three iterations.
    """
    last = max(done, config.train.iterations - 1)
    costs = [predict_cost(config, num_steps, iteration) for iteration in sorted({done, (done + last) // 2, last})]
    most = max(costs, key=lambda cost: cost.graphs)
    rows = zip_longest(*(cost.graph_rows for cost in costs), fillvalue=0)
    return replace(most, graph_rows=tuple(map(max, rows)))


def _finishes(evaluation: Evaluation) -> bool:
    """Return whether all edges of an evaluation are ODE steps that only lead to a reward."""
    return all(edges.move.ode_stops is not None and not edges.move.trained for edges in evaluation.edges)


def exact_finish_cost(config: Config, num_steps: int) -> tuple[int, int]:
    """Return the model rows and decoded samples of finishing the first group exactly; (0, 0) if `finish` sets no check."""
    tree = config.algorithm.tree
    finish = getattr(tree, "finish", None)
    if finish is None or not finish.every:
        return 0, 0
    exact = config.algorithm.model_copy(update={"tree": tree.exact})
    grown = _grow_tree(config.model_copy(update={"algorithm": exact}), num_steps, 0, config.train.group_size)
    states = {node.parent for node in grown.nodes if node.parent is not None and node.root.group == 0}
    return len(states), sum(grown.nodes[leaf].root.group == 0 for leaf in grown.leaves)


def most_hinted(config: Config, num_steps: int) -> tuple[int, int]:
    """Return the most model rows and decoded samples that hints add to an iteration.

    All groups then have hints from step 1 on, and candidates, if the source of hints samples such.
    """
    hints, train = config.algorithm.hints, config.train
    if hints.name == "none":
        return 0, 0
    tree = _grow_tree(config, num_steps, 0, train.groups * train.group_size, step=1)
    roots = config.algorithm.roots(train.group_size)
    first = roots - int(hints.replace * roots)
    states = {node.parent for node in tree.nodes if node.parent is not None and node.root.index >= first}
    decoded = sum(tree.nodes[leaf].root.index >= first for leaf in tree.leaves)
    if (use := search_use(hints)) is None:
        return len(states), decoded
    candidates = train.groups * use.width
    return len(states) + candidates * num_steps, decoded + candidates * (1 + len(compared_steps(use, num_steps)))


def most_further(config: Config, num_steps: int) -> tuple[int, int, int]:
    """Return the most that a second stage adds to an iteration: rows of the rollout and of the update, and samples.

    A selection of trained units (`train.select`) is not counted on.
    """
    roots = config.algorithm.roots(config.train.group_size)
    further = second_stage.most_roots(config) - roots
    if not further:
        return 0, 0, 0
    cost = predict_cost(
        config.model_copy(update={"train": config.train.model_copy(update={"select": None})}), num_steps
    )
    rollout, update, decoded = (-(-count * further // roots) for count in (cost.rollout, cost.update, cost.decoded))
    return rollout, update, decoded


def _of_samples(config: Config, tree: Tree, units: CreditUnits, *, keep: torch.Tensor, trained: torch.Tensor) -> Cost:
    """Return the cost of an iteration with likelihood elbo; `keep` and `trained` as in `calls_of`."""
    algorithm, likelihood = config.algorithm, config.algorithm.likelihood
    assert likelihood.name == "elbo"
    calls = calls_of(
        likelihood,
        tree,
        units,
        keep=keep,
        trained=trained,
        micro_batch=config.train.update_rows,
        mixes_levels=True,
        address=(config.run.seed, "elbo", 0),
    )
    if not calls:
        raise InputError(
            f"algorithm.baseline: {algorithm.baseline.name} leaves no sample that {algorithm.objective.name} could learn "
            "from; take group_mean"
        )
    forwards = sum(len(call.draws) for call in calls)
    at_levels = Counter((call.part, draw.sigma) for call in calls for draw in call.draws)
    other_policies, first_pass = algorithm.objective.policies, 0
    if algorithm.objective.couples == "nothing":
        other_policies = other_policies | {likelihood.anchor} - {"live"}
    else:  # a first pass with the policy and its anchor, before the samples are coupled
        first_pass = 2
    resampled = 0  # rows of a snapshot's chains, which replace the worse sample of each stored pair
    if config.data.groups and algorithm.sampler == "bank":
        pairs = len({tree.nodes[tree.leaves[leaf]].root.group for leaf in keep.nonzero().flatten().tolist()})
        resampled = pairs * sum(len(e.rows) for e in tree.evaluations) // len(tree.leaves)
    return Cost(
        rollout=0 if config.data.groups else sum(len(e.rows) for e in tree.evaluations),
        update=forwards * (1 + len(other_policies) + first_pass) + resampled,
        with_gradient=forwards,
        decoded=0 if config.data.groups else len(tree.leaves),
        trained_edges=forwards,
        update_batches=len(calls),
        level_batches=sum(-(-count // config.train.update_rows) for count in at_levels.values()),
    )


def _grow_tree(config: Config, num_steps: int, iteration: int, rows: int, *, step: int = 0) -> Tree:
    """Grow the trees of an iteration from `step` on states of a single number, in evaluations of at most `rows` rows."""
    train, algorithm = config.train, config.algorithm
    size = algorithm.roots(train.group_size)
    parts = of_roots(train, size, [size] * train.groups, seed=config.run.seed, iteration=iteration)
    roots = [
        Root(group, i, None, part=part, step=step)
        for group, of_group in enumerate(parts)
        for i, part in enumerate(of_group)
    ]
    return grow(
        algorithm.plan(algorithm.kernel.kernels(num_steps), train.group_size, config.run.seed, iteration),
        linear_sigmas(num_steps).tolist(),
        roots,
        (torch.zeros(len(roots), 1),),
        lambda state, sigma, rows: state,
        lambda shape, *address: torch.zeros(shape),
        rows,
        algorithm.objective.needs_old_means,
    )


def count_kept(config: Config, num_steps: int) -> tuple[int, int]:
    """Return the number of latent states that a rollout keeps on all processes, and of samples in its largest group."""
    algorithm = config.algorithm
    if isinstance(algorithm.tree, Adaptive):  # take the shape with the most samples that a run may reach
        widest = algorithm.tree.widest(algorithm.kernel.kernels(num_steps))
        algorithm = algorithm.model_copy(update={"tree": widest})
        config = config.model_copy(update={"algorithm": algorithm})
    tree = _grow_tree(config, num_steps, 0, config.train.groups * config.train.group_size)
    states = {id(x): x.numel() for e in tree.evaluations for x in e.state or ()}
    for edges in (edges for e in tree.evaluations for edges in e.edges):
        states |= {id(x): x.numel() for state in (edges.next_state, edges.mean) for x in state or ()}
    groups = Counter(tree.nodes[leaf].root.group for leaf in tree.leaves)
    estimates = 2 if algorithm.kernel.solver == "dpm2" else 0  # before and after a step of second order
    return sum(states.values()) + (1 + estimates) * len(tree.leaves), max(groups.values())


def _check_calibration(tree: Tree, rewards: torch.Tensor) -> None:
    try:
        step_signs(tree, rewards)
    except InputError:
        raise InputError(
            "algorithm.kernel.calibrate: it counts the gains of steps, for which every state needs a value; take the tree "
            "twigs with root: true"
        ) from None
