"""One sample explained: what other noise at each step would have made of it, and how much each step decides.

The noise of every step has an address, so that one step's can be drawn again while all others stay: what comes out differs
by that noise alone. How much the steps decide on the whole is the spectrum of chains that share the sample's start, see
`flow.diagnostics.spectrum`. By the law of total variance their shares are those of the variance that the start leaves.
Both walk as the run's method does: the noise of a step is that of the first edge which the method draws there from this
start, and the credit is what that edge was given, in a group of the run's size.
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
from flowgrpo.flow.diagnostics.spectrum import VarianceShare, nested, spectrum
from flowgrpo.flow.pipeline.policy import Policy
from flowgrpo.flow.rollouts.adaptive_tree import Shaping
from flowgrpo.flow.rollouts.rollout import edge_noise, rollout, walk
from flowgrpo.flow.rollouts.state_preview import Foretold, estimates_by_state, small
from flowgrpo.training.advantages import unit_selection
from flowgrpo.training.advantages.reward_combination import Combination
from flowgrpo.training.reports.tree_store import known
from flowgrpo.training.run.phases import phase
from flowgrpo.training.scoring.scorer import Scorer
from rewards import Reward
from samplers import noise
from samplers.batches import batched
from samplers.kernels import Kernel, State, slope
from samplers.levels import DEFAULT_LEVELS
from samplers.trees import TRUNK, TWIG, Move, Plan, Root, Tree, drawn_noise, grow, stacked

REDRAWN, STILL = "redrawn", "still"
SIDE = 96  # of a picture, pixels
LENT = "flow_sde"  # the kernel of a sample whose method draws no noise


@dataclass(frozen=True, kw_only=True)
class Look:
    """A sample, or what was foretold of it.

    Attributes:
        reward: in total, None where it was lost.
        picture: uint8 (h, w, 4).
    """

    reward: float | None
    picture: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step of the schedule that has noise.

    Attributes:
        index: in the schedule, counted from 0.
        sigma: before it.
        kernel: its name and level.
        std: of its noise.
        before: what the model foretold before it.
        after: the same with its noise; the sample itself after the last step.
        redraws: the samples that other noise at this step would have given.
        advantage: what the method gives the edge of this noise; None where it gives none.
        share: of the variance that the noises make together.
    """

    index: int
    sigma: float
    kernel: str
    std: float
    before: Look
    after: Look
    redraws: Sequence[Look]
    advantage: float | None
    share: VarianceShare | None

    @property
    def deviation(self) -> float | None:
        """Standard deviation of the redraws' rewards; None of fewer than two."""
        values = [look.reward for look in self.redraws if look.reward is not None]
        return float(np.std(values, ddof=1)) if len(values) > 1 else None


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What is known of one sample.

    Attributes:
        sample: as its noise made it.
        still: what comes of the same start without any noise.
        steps: those that have noise, in their order.
        of_steps: how many the schedule has.
        variance: of the reward over the noise of all steps, the start given.
        residual: what the shares leave of it, which is 0 but for the error; None without any variance.
        lost: samples of the chains whose reward was lost.
        lent: whether the noise is not the method's own, which draws none.
        evaluations: of the model.
    """

    row: Row
    sample: Look
    still: Look
    steps: Sequence[Step]
    of_steps: int
    variance: float
    residual: VarianceShare | None
    lost: int
    lent: bool
    evaluations: int


@dataclass(frozen=True)
class Trajectory:
    """How a method leads from a start: a move, a noise and a credit at each step of the schedule that has noise."""

    moves: Sequence[Move]
    noises: Mapping[int, State]
    advantages: Mapping[int, float | None]
    lent: bool

    @property
    def splits(self) -> list[int]:
        """The steps that have noise."""
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
    """Explain the sample of a prompt and a seed.

    Args:
        policy: with the weights to explain, called as training calls it; its sigmas are known.
        rewards: those that are trained on, none of which compares samples with each other.
        row: its seed is that of the start.
        iteration: of the run, at which the method's windows and shapes are taken.
        rollout_state: of the checkpoint, see `checkpoint.rollout_state`.
        redraws: of each step.
        chains: that tell how much each step decides, two or more.
    """
    before, combination = policy.evaluations, Combination.of(rewards, config.algorithm.baseline)
    scoring = _Scoring(policy, rewards, combination, config.train.rollout_rows)
    with phase("method"):
        own = _by_method(config, policy, scoring, row, iteration=iteration, rollout_state=rollout_state)
    with phase("redrawing"):
        fresh = config.run.seed, "redraw", iteration, row.seed
        seen = _redrawn(policy, scoring, row, own, redraws=redraws, fresh=fresh)
    with phase("measuring steps"):
        roots = [Root(1 + row.seed, index, row) for index in range(chains)]  # group 0 is the method's
        plan, seed = nested(own.moves, own.splits), config.run.seed
        tree = walk(policy, plan, roots, micro_batch=scoring.size, seed=seed, iteration=iteration)
        totals = torch.tensor(scoring.totals(tree), dtype=torch.float64)
        shares, variance = spectrum(tree, totals)
        if not all(math.isfinite(each.share) and math.isfinite(each.error) for each in shares):
            shares = []  # of some step no two known samples are left to compare
    by_step = {share.steps[0]: share for share in shares if share.steps is not None}
    steps = [replace(step, share=by_step.get(step.index)) for step in seen.steps]
    residual = next((share for share in shares if share.steps is None), None)
    return replace(
        seen,
        steps=steps,
        variance=variance if shares else 0.0,
        residual=residual,
        lost=int(totals.isnan().sum()),
        evaluations=policy.evaluations - before,
    )


@dataclass(frozen=True)
class _Scoring:
    """Decodes and scores samples, so many at once, and keeps no more of them than small pictures."""

    policy: Policy
    rewards: Sequence[Reward]
    combination: Combination
    size: int

    def looks(self, states: Sequence[State], row: Row) -> list[Look]:
        """Of states without noise."""
        found = []
        with Scorer(self.rewards) as scorer:
            for own in batched(states, self.size):
                rows = [row] * len(own)
                samples = self.policy.decode(stacked(own), rows)
                totals = self.combination.total(scorer.submit(samples, rows)().values).tolist()
                found += [
                    Look(reward=known(total), picture=small(sample, SIDE))
                    for total, sample in zip(totals, samples, strict=True)
                ]
        return found

    def totals(self, tree: Tree) -> list[float]:
        """The total reward of each leaf, NaN where it was lost."""
        found, leaves = [], range(len(tree.leaves))
        with Scorer(self.rewards) as scorer:
            for own in batched(leaves, self.size):
                rows = [tree.nodes[tree.leaves[leaf]].root.row for leaf in own]
                samples = self.policy.decode(tuple(x[own] for x in tree.samples), rows)
                found += self.combination.total(scorer.submit(samples, rows)().values).tolist()
        return found


def _by_method(
    config: Config, policy: Policy, scoring: _Scoring, row: Row, *, iteration: int, rollout_state: Any
) -> Trajectory:
    """What the method draws from the start of a row, and the credit that it gives, in a group whose first start it is."""
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
        solver=algorithm.solver,
    )
    credit = _credit(config, algorithm, tree, scoring.combination, rewards=scores.values)
    return _first_walk(tree, credit, edge_noise(seed, iteration))


def _credit(
    config: Config, algorithm: Algorithm, tree: Tree, combination: Combination, *, rewards: torch.Tensor
) -> dict[int, float | None]:
    """The advantage of the edge to each node that has a unit."""
    units = algorithm.credit.units(tree, combination.columns(rewards), combination.weights)
    unknown = torch.full((len(units.values),), torch.nan, dtype=torch.float64)  # nobody has trained on the prompt
    advantages, _ = unit_selection.normalize_advantages(
        units, combination.weights, expected=unknown, baseline=algorithm.baseline, select=config.train.select
    )
    values = advantages.tolist()
    return {node: known(values[unit]) for node, unit in enumerate(units.of_edge.tolist()) if unit >= 0}


def _first_walk(tree: Tree, credit: Mapping[int, float | None], drawn: Any) -> Trajectory:
    """The first edge that has noise at each step, of the first start, as one walk; of a tree without noise a lent one."""
    last = len(tree.sigmas) - 2
    first: dict[int, tuple[tuple[int, ...], int, Any, int]] = {}  # by step: path, node, its edges, place in them
    for evaluation in tree.evaluations:
        for edges in evaluation.edges:
            for place, node in enumerate(edges.nodes.tolist() if edges.move.kernel.stochastic else ()):
                own = tree.nodes[node]
                step = tree.nodes[own.parent].step
                if own.root.index == 0 and own.role != TWIG and (step not in first or own.path < first[step][0]):
                    first[step] = own.path, node, edges, place
    shapes = [x.shape[1:] for x in tree.samples]
    if not first:
        lent = Move(Kernel(LENT, DEFAULT_LEVELS[LENT]))
        leaf = next(leaf for leaf in tree.leaves if tree.nodes[leaf].root.index == 0)
        path = tree.nodes[leaf].path
        noises = {s: tuple(drawn(shape, 0, path, s, c) for c, shape in enumerate(shapes)) for s in range(last)}
        return Trajectory([lent] * last + [Move()], noises, dict.fromkeys(range(last), credit.get(leaf)), True)
    moves, noises = [Move()] * (last + 1), {}
    for step, (_, _, edges, place) in first.items():
        moves[step] = Move(edges.move.kernel, noise_scale=edges.move.noise_scale)
        noises[step] = tuple(
            drawn_noise(tree, edges, shape, c, drawn)[place] / edges.move.noise_scale for c, shape in enumerate(shapes)
        )
    return Trajectory(moves, noises, {step: credit.get(node) for step, (_, node, _, _) in first.items()}, False)


def _redrawn(
    policy: Policy, scoring: _Scoring, row: Row, own: Trajectory, *, redraws: int, fresh: tuple[Any, ...]
) -> Explanation:
    """The sample, what its states foretold, and its redraws; nothing yet of the spectrum.

    Args:
        fresh: where the address of a redraw's noise begins.
    """
    foretold, start = Foretold(policy.velocity, [row]), policy.start([row])
    plan, drawn = _redraw_plan(own, redraws), _kept_but_one(own, fresh)
    tree = grow(plan, policy.sigmas, [Root(0, 0, row)], start, foretold, drawn, scoring.size)
    leaves = scoring.looks([tuple(x[leaf] for x in tree.samples) for leaf in range(len(tree.leaves))], row)
    by_node = dict(zip(tree.leaves, leaves, strict=True))
    trunk = [i for i, node in enumerate(tree.nodes) if node.role == TRUNK]  # a state at each step of the schedule
    states, device = estimates_by_state(tree, foretold), tree.samples[0].device
    seen = scoring.looks([tuple(x.to(device) for x in states[i, tree.nodes[i].step]) for i in trunk[:-1]], row)
    sample = by_node[trunk[-1]]
    ways = {leaf: tree.ancestry(leaf) for leaf in tree.leaves}
    steps = []
    for step, (now, then) in enumerate(pairwise([*seen, sample])):
        move = own.moves[step]
        if not move.kernel.stochastic:
            continue
        _, std = slope(move.kernel, policy.sigmas[step], policy.sigmas[step + 1], tree.sigma_cap)
        others = [leaf for leaf, way in ways.items() if _left_at(tree, way) == step]
        steps.append(
            Step(
                index=step,
                sigma=policy.sigmas[step],
                kernel=f"{move.kernel.name} {move.kernel.level:g}",
                std=move.noise_scale * std,
                before=now,
                after=then,
                redraws=[by_node[leaf] for leaf in sorted(others, key=lambda leaf: tree.nodes[leaf].path)],
                advantage=own.advantages.get(step),
                share=None,
            )
        )
    still = next(by_node[leaf] for leaf in tree.leaves if tree.nodes[leaf].role == STILL)
    return Explanation(
        row=row,
        sample=sample,
        still=still,
        steps=steps,
        of_steps=len(own.moves),
        variance=0.0,
        residual=None,
        lost=0,
        lent=own.lent,
        evaluations=0,
    )


def _left_at(tree: Tree, way: Sequence[int]) -> int | None:
    """The step at which a redraw left the sample's own way; None of what is no redraw."""
    redrawn = [node for node in way if tree.nodes[node].role == REDRAWN]
    parent = tree.nodes[redrawn[-1]].parent if redrawn else None
    return None if parent is None else tree.nodes[parent].step


def _redraw_plan(own: Trajectory, redraws: int) -> Plan:
    """The own walk, from each step of which redraws leave it, and one without noise from the start."""

    def plan(role: str, step: int) -> tuple[Move, ...]:
        if role == STILL:
            return (Move(role=STILL),)
        onward = replace(own.moves[step], role=role)
        if role == REDRAWN:
            return (onward,)
        others = (replace(onward, role=REDRAWN, count=redraws),) if onward.kernel.stochastic else ()
        return (onward, *others, *((Move(role=STILL),) if step == 0 else ()))

    return plan


def _kept_but_one(own: Trajectory, fresh: tuple[Any, ...]) -> Any:
    """The noise of `_redraw_plan`: the own one, but for the step at which a redraw left the own walk."""
    partings = sorted({0, *own.splits})  # where a path gets one number longer, which is 0 on the own walk

    def drawn(shape: Sequence[int], *address: Any) -> torch.Tensor:
        _, path, step, component = address
        if path[-1] > 0 and len(path) > 1 and partings[len(path) - 2] == step:
            return noise.noise(shape, *fresh, step, path[-1], component)
        return own.noises[step][component]

    return drawn
