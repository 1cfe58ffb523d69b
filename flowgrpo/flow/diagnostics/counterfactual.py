"""The explanation of one sample: redraw the noise of single steps, and measure each step's share of the variance.

The noise of every step has its own random address (`samplers.noise`), so one step's noise can be redrawn with all others
fixed. The share of a step is its share of the reward's variance given the start. It is measured by the spectrum
(`flow.diagnostics.spectrum`) of chains from the sample's start. The noise of a step is that of the first edge which the
run's method draws at this step from this start. Its advantage is that edge's advantage in a group of the run's size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from flowgrpo.data.prompts import Row
from flowgrpo.flow.config import Algorithm, Config
from flowgrpo.flow.diagnostics.spectrum import VarianceShare, plan_nested, spectrum
from flowgrpo.flow.pipeline.policy import Policy
from flowgrpo.flow.rollouts.adaptive_tree import Shaping
from flowgrpo.flow.rollouts.rollout import edge_noise, rollout, walk
from flowgrpo.flow.rollouts.state_preview import EstimateRecorder, estimates_by_node, small
from flowgrpo.training.advantages import unit_selection
from flowgrpo.training.advantages.reward_combination import Combination
from flowgrpo.training.reports.tree_store import finite_or_none
from flowgrpo.training.run.phases import phase
from flowgrpo.training.scoring.scorer import Scorer
from rewards import Reward
from samplers import noise
from samplers.batches import batched
from samplers.growth import draw_noise, grow
from samplers.kernels import DPM2, ODE, Kernel, State, slope
from samplers.levels import DEFAULT_LEVELS
from samplers.trees import TRUNK, TWIG, Move, Plan, Root, Tree, stack_states

REDRAWN, STILL = "redrawn", "still"
SIDE = 96  # longest side of a picture, pixels
LENT = "flow_sde"  # kernel that is used in explanations of methods without noise


@dataclass(frozen=True, kw_only=True)
class Look:
    """A sample, or the prediction of one from a state: total reward (None if lost) and small frames, uint8 (F, h, w, 4)."""

    reward: float | None
    picture: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Step:
    """A noisy step of the schedule."""

    index: int  # in the schedule, counted from 0
    sigma: float  # before the step
    kernel: str  # name and level
    std: float  # standard deviation of the step's noise
    before: Look  # predicted sample before the step
    after: Look  # predicted sample after the step; after the last step the sample itself
    redraws: Sequence[Look]  # samples with other noise at this step
    advantage: float | None  # of the step's edge in the method; None if it has none
    share: VarianceShare | None  # of the reward's variance over all noise

    @property
    def deviation(self) -> float | None:
        """Return the standard deviation of the redraws' rewards; None for fewer than two."""
        values = [look.reward for look in self.redraws if look.reward is not None]
        return float(np.std(values, ddof=1)) if len(values) > 1 else None


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """An explained sample."""

    row: Row
    sample: Look  # the sample, with its own noise
    still: Look  # the sample from the same start without noise
    steps: Sequence[Step]  # the noisy steps, in order
    of_steps: int  # number of steps of the schedule
    variance: float  # of the reward over all noise, given the start
    residual: VarianceShare | None  # share of no step, which is 0 up to its error; None without variance
    lost: int  # number of chain samples with a lost reward
    lent: bool  # whether the noise is that of `LENT`, because the method has none
    evaluations: int  # number of model evaluations


@dataclass(frozen=True)
class Trajectory:
    """A method's chain from a start: a move per step, and the noise and advantage of each noisy step."""

    moves: Sequence[Move]
    noises: Mapping[int, State]
    advantages: Mapping[int, float | None]
    lent: bool

    @property
    def splits(self) -> list[int]:
        """Return the indices of the noisy steps."""
        return [step for step, move in enumerate(self.moves) if move.kernel.stochastic]


@torch.no_grad()
def explain(
    config: Config,
    policy: Policy,
    rewards: Sequence[Reward],
    row: Row,
    *,
    iteration: int = 0,
    rollout_state: Any = None,
    redraws: int = 16,
    chains: int = 128,
) -> Explanation:
    """Explain the sample of `row` with the current weights of `policy`, which has prepared the row as for training.

    Args:
        rewards: the trained rewards, none of them group-wise.
        iteration: iteration of the run, which determines the method's windows and tree shapes.
        rollout_state: state of rollouts in the checkpoint, see `checkpoint.rollout_state`.
        chains: number of chains that are sampled to measure the steps' shares, two or more.
    """
    before, combination = policy.evaluations, Combination.of(rewards, config.algorithm.baseline)
    scoring = _Scoring(policy, rewards, combination, config.train.rollout_rows)
    with phase("method"):
        method = _by_method(config, policy, scoring, row, iteration=iteration, rollout_state=rollout_state)
    with phase("redrawing"):
        fresh = config.run.seed, "redraw", iteration, row.seed
        sample, still, steps = _redraw(policy, scoring, row, method, redraws=redraws, fresh=fresh)
    with phase("measuring steps"):
        roots = [Root(1 + row.seed, index, row) for index in range(chains)]  # group 0 is that of the method's rollout
        plan, seed = plan_nested(method.moves, method.splits), config.run.seed
        tree = walk(policy, plan, roots, micro_batch=scoring.size, seed=seed, iteration=iteration)
        totals = torch.tensor(scoring.totals(tree), dtype=torch.float64)
        shares, variance = spectrum(tree, totals)
        if not all(math.isfinite(each.share) and math.isfinite(each.error) for each in shares):
            shares = []  # too many rewards are lost: some step has no two samples to compare
    by_step = {share.steps[0]: share for share in shares if share.steps is not None}
    return Explanation(
        row=row,
        sample=sample,
        still=still,
        steps=[replace(step, share=by_step.get(step.index)) for step in steps],
        of_steps=len(method.moves),
        variance=variance if shares else 0.0,
        residual=next((share for share in shares if share.steps is None), None),
        lost=int(totals.isnan().sum()),
        lent=method.lent,
        evaluations=policy.evaluations - before,
    )


@dataclass(frozen=True)
class _Scoring:
    """Decoding and scoring of samples in batches; only small pictures are kept."""

    policy: Policy
    rewards: Sequence[Reward]
    combination: Combination
    size: int

    def looks(self, states: Sequence[State], row: Row) -> list[Look]:
        """Decode and score clean states."""
        looks: list[Look] = []
        with Scorer(self.rewards) as scorer:
            for batch in batched(states, self.size):
                rows = [row] * len(batch)
                samples = self.policy.decode(stack_states(batch), rows)
                totals = self.combination.total(scorer.submit(samples, rows)().values).tolist()
                pairs = zip(totals, samples, strict=True)
                looks += [Look(reward=finite_or_none(total), picture=small(sample, SIDE)) for total, sample in pairs]
        return looks

    def totals(self, tree: Tree) -> list[float]:
        """Return the total reward of each leaf; NaN if lost."""
        totals: list[float] = []
        with Scorer(self.rewards) as scorer:
            for batch in batched(range(len(tree.leaves)), self.size):
                rows = [tree.nodes[tree.leaves[leaf]].root.row for leaf in batch]
                samples = self.policy.decode(tuple(x[batch] for x in tree.samples), rows)
                totals += self.combination.total(scorer.submit(samples, rows)().values).tolist()
        return totals


def _by_method(
    config: Config, policy: Policy, scoring: _Scoring, row: Row, *, iteration: int, rollout_state: Any
) -> Trajectory:
    """Roll out one group by the run's method, with `row` as its first start; return the chain from that start."""
    algorithm, size, seed = config.algorithm, config.train.group_size, config.run.seed
    levels = rollout_state
    if algorithm.tree.adapts:
        shaping, levels = Shaping(config), None
        if rollout_state is not None:
            shaping.restore(rollout_state)
        algorithm = shaping.algorithm(iteration)
    kernels = algorithm.kernel.kernels(len(policy.sigmas) - 1, levels)
    plan = algorithm.plan(kernels, size, seed, iteration)
    others = [noise.seed(seed, "explain", row.seed, index) for index in range(1, algorithm.roots(size))]
    if algorithm.tree.start == "shared":
        others = [row.seed] * len(others)
    rows = [row, *(replace(row, seed=other) for other in others)]
    tree, scores = rollout(
        policy,
        plan,
        [Root(0, index, each) for index, each in enumerate(rows)],
        rewards=scoring.rewards,
        micro_batch=scoring.size,
        seed=seed,
        iteration=iteration,
    )
    credit = _credit(config, algorithm, tree, scoring.combination, rewards=scores.values)
    return _first_walk(tree, credit, edge_noise(seed, iteration))


def _credit(
    config: Config, algorithm: Algorithm, tree: Tree, combination: Combination, *, rewards: torch.Tensor
) -> dict[int, float | None]:
    """Return the advantage of the edge to each node, for nodes whose edge belongs to a credit unit."""
    units = algorithm.credit.units(tree, combination.columns(rewards), combination.weights)
    advantages, _ = unit_selection.normalize_advantages(
        units, combination.weights, past=None, baseline=algorithm.baseline, select=config.train.select
    )
    values = advantages.tolist()
    return {node: finite_or_none(values[unit]) for node, unit in enumerate(units.of_edge.tolist()) if unit >= 0}


def _first_walk(tree: Tree, credit: Mapping[int, float | None], drawn: Any) -> Trajectory:
    """Chain the first noisy edge of each step from the first start; if no edge is noisy, chain steps of `LENT`."""
    last = len(tree.sigmas) - 2
    first: dict[int, tuple[tuple[int, ...], int, Any, int]] = {}  # step -> path, node, its edges, index in these
    for evaluation in tree.evaluations:
        for edges in evaluation.edges:
            for place, node in enumerate(edges.nodes.tolist() if edges.move.kernel.stochastic else ()):
                child = tree.nodes[node]
                step = tree.nodes[child.parent].step
                if child.root.index == 0 and child.role != TWIG and (step not in first or child.path < first[step][0]):
                    first[step] = child.path, node, edges, place
    shapes = [x.shape[1:] for x in tree.samples]
    if not first:
        lent = Move(Kernel(LENT, DEFAULT_LEVELS[LENT]))
        leaf = next(leaf for leaf in tree.leaves if tree.nodes[leaf].root.index == 0)
        path = tree.nodes[leaf].path
        noises = {s: tuple(drawn(shape, 0, path, s, c) for c, shape in enumerate(shapes)) for s in range(last)}
        return Trajectory([lent] * last + [Move()], noises, dict.fromkeys(range(last), credit.get(leaf)), True)
    still = DPM2 if any(edges.move.kernel == DPM2 for e in tree.evaluations for edges in e.edges) else ODE
    moves, noises = [Move(still)] * (last + 1), {}
    for step, (_, _, edges, place) in first.items():
        moves[step] = Move(edges.move.kernel, noise_scale=edges.move.noise_scale)
        noises[step] = tuple(
            draw_noise(tree, edges, shape, c, drawn)[place] / edges.move.noise_scale for c, shape in enumerate(shapes)
        )
    return Trajectory(moves, noises, {step: credit.get(node) for step, (_, node, _, _) in first.items()}, False)


def _redraw(
    policy: Policy, scoring: _Scoring, row: Row, method: Trajectory, *, redraws: int, fresh: tuple[Any, ...]
) -> tuple[Look, Look, list[Step]]:
    """Return the sample, the sample without noise, and the noisy steps; redraws' noise addresses begin with `fresh`."""
    recorder, start = EstimateRecorder(policy.velocity, [row]), policy.start([row])
    plan, drawn = _redraw_plan(method, redraws), _redraw_noise(method, fresh)
    tree = grow(plan, policy.sigmas, [Root(0, 0, row)], start, recorder, drawn, scoring.size)
    leaves = scoring.looks([tuple(x[leaf] for x in tree.samples) for leaf in range(len(tree.leaves))], row)
    by_node = dict(zip(tree.leaves, leaves, strict=True))
    trunk = [i for i, node in enumerate(tree.nodes) if node.role == TRUNK]  # one state per step
    states, device = estimates_by_node(tree, recorder), tree.samples[0].device
    predictions = scoring.looks([tuple(x.to(device) for x in states[i]) for i in trunk[:-1]], row)
    sample = by_node[trunk[-1]]
    ways = {leaf: tree.ancestry(leaf) for leaf in tree.leaves}
    steps = []
    for step, (now, then) in enumerate(pairwise([*predictions, sample])):
        move = method.moves[step]
        if not move.kernel.stochastic:
            continue
        _, std = slope(move.kernel, policy.sigmas[step], policy.sigmas[step + 1], tree.sigma_cap)
        others = [leaf for leaf, way in ways.items() if _branch_step(tree, way) == step]
        steps.append(
            Step(
                index=step,
                sigma=policy.sigmas[step],
                kernel=move.kernel.label,
                std=move.noise_scale * std,
                before=now,
                after=then,
                redraws=[by_node[leaf] for leaf in sorted(others, key=lambda leaf: tree.nodes[leaf].path)],
                advantage=method.advantages.get(step),
                share=None,
            )
        )
    still = next(by_node[leaf] for leaf in tree.leaves if tree.nodes[leaf].role == STILL)
    return sample, still, steps


def _branch_step(tree: Tree, way: Sequence[int]) -> int | None:
    """Return the step at which the path `way` of a redraw leaves the trunk; None for a path that is no redraw."""
    redrawn = [node for node in way if tree.nodes[node].role == REDRAWN]
    parent = tree.nodes[redrawn[-1]].parent if redrawn else None
    return None if parent is None else tree.nodes[parent].step


def _redraw_plan(method: Trajectory, redraws: int) -> Plan:
    """Plan a trunk, redraws that leave it at each noisy step, and one chain without noise from the start."""

    def plan(role: str, step: int) -> tuple[Move, ...]:
        if role == STILL:
            return (Move(role=STILL),)
        onward = replace(method.moves[step], role=role)
        if role == REDRAWN:
            return (onward,)
        others = (replace(onward, role=REDRAWN, count=redraws),) if onward.kernel.stochastic else ()
        return (onward, *others, *((Move(role=STILL),) if step == 0 else ()))

    return plan


def _redraw_noise(method: Trajectory, fresh: tuple[Any, ...]) -> Any:
    """Return the noise function of `_redraw_plan`: the method's noise, but fresh noise where a redraw leaves the trunk."""
    partings = sorted({0, *method.splits})  # each of these steps appends a number to a path, which is 0 on the trunk

    def drawn(shape: Sequence[int], *address: Any) -> torch.Tensor:
        _, path, step, component = address
        if path[-1] > 0 and len(path) > 1 and partings[len(path) - 2] == step:
            return noise.noise(shape, *fresh, step, path[-1], component)
        return method.noises[step][component]

    return drawn
