"""Hold the gradient of each trajectory preset's update against the exact one (docs/research/oracle.md).

The model is `gaussian_flow`, whose expected reward has a closed form. A preset rolls out, credits and replays by the code of
a run; its gradient is divided by the weights of its edges, and compared step by step with what that edge's kernel, trunk and
finish make of the reward, times the factor that its baseline leaves of it.
"""

import math
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from operator import mul
from typing import Any

import torch
from field import credit, step_in_place
from gaussian_flow import REWARDS, STD, Gradient, Step, cosine, gradient, schedule, step, velocity, whole_gradient
from opened import Opened

from flowgrpo import config
from flowgrpo.data.prompts import Prompt
from flowgrpo.flow.methods import presets
from flowgrpo.flow.pipeline.velocity_field import FieldPolicy
from flowgrpo.flow.trainer import flow_loop
from flowgrpo.flow.updates.update import Credited
from flowgrpo.training.scoring.rollout_batch import Made
from flowgrpo.training.weights.trained_weights import Weights
from rewards import Reward
from samplers.trees import Tree

PRESETS = [  # a distillation's update is in expectation nothing of the reward, and a median's has no closed form
    name
    for name, row in presets.PRESETS.items()
    if row["likelihood"]["name"] == "trajectory"
    and row["objective"]["name"] != "distill"
    and row["baseline"]["name"] != "median"
]
# Of a group; of the others 8.
SIZES = dict.fromkeys(("tempflow", "tempflow_fast", "adaptive"), 12)
SIZES |= dict.fromkeys(("branch_grpo", "branch_grpo_mix"), 16)
BATCHES, GROUPS = 40, 4
# Of those that ask the model most often, and vary less for it.
FEWER = dict.fromkeys(("tempflow", "adaptive", "dense_grpo", "stepwise_flow_grpo"), 20)
SIGMAS = schedule()
# What all presets are tried without: the division by a std, which has no closed form, and pulls, which are 0 at the start.
PLAIN = {
    "algorithm.baseline.std": "none",
    "algorithm.objective.kl": {"beta": 0.0, "previous": 0.0, "target": None, "max_beta": None, "reference": "fixed"},
}


class Shifted(torch.nn.Module):
    """The exact velocity of data of some std, with a shift and a slope for each step, all 0."""

    def __init__(self, std: float = STD):
        super().__init__()
        self.std = std
        self.theta, self.phi = (torch.nn.Parameter(torch.zeros(len(SIGMAS) - 1)) for _ in range(2))

    def forward(self, x: torch.Tensor, sigma: torch.Tensor, rows: Sequence[Any]) -> torch.Tensor:
        """The velocity (B, 1) at states (B, 1)."""
        steps = [_step(level) for level in sigma.tolist()]
        slope, shift = torch.tensor([velocity(SIGMAS[i], std=self.std) for i in steps])[:, :, None].unbind(1)
        return slope * x + shift + self.theta[steps][:, None] + self.phi[steps][:, None] * x


@dataclass(frozen=True, kw_only=True)
class Seen:
    """One batch of groups.

    Attributes:
        signal: by step, the mean over its edges of advantage times gradient of the log-probability.
        exact: its expectation; None where no closed form is known.
        weight: by step, the share of the update's weight.
        chain, ode: exact gradients of the sampler as it is rolled out, and by ODE.
        evaluations: of the model for a group, rollout and update.
    """

    signal: dict[int, Gradient]
    exact: dict[int, Gradient] | None
    weight: dict[int, float]
    chain: list[Gradient]
    ode: list[Gradient]
    evaluations: float


@cache
def _step(sigma: float) -> int:
    return min(range(len(SIGMAS) - 1), key=lambda i: abs(SIGMAS[i] - sigma))


@contextmanager
def trainer(
    preset: str,
    reward: str,
    *,
    groups: int = GROUPS,
    size: int = 1,
    model: torch.nn.Module | None = None,
    earned: Callable[[torch.Tensor], torch.Tensor] | None = None,
    **overrides: Any,
) -> Iterator[Opened]:
    """A run of a preset, on the Gaussian flow and its rewards unless a model of samples (B, `size`) is given."""
    earned = earned or REWARDS[reward]
    with tempfile.TemporaryDirectory() as folder:
        written = {
            "model": {"path": "field", "lora": None},
            "algorithm": {"preset": preset},
            "rewards": [reward],
            "train": {"groups": groups, "group_size": SIZES.get(preset, 8), "updates": 1, "micro_batch": 1 << 20},
            "run": {"dir": folder, "name": "run"},
        }
        written["train"] |= {"ema": None, "draft": None}
        for key, value in {**PLAIN, **overrides}.items():
            *sections, last = key.split(".")
            place = written
            for name in sections:
                place = place.setdefault(name, {})
            place[last] = value
        chosen = config.validate(written)
        chosen.run.folder.mkdir()
        policy = FieldPolicy(model or Shifted(), (size,), SIGMAS)
        algorithm = chosen.algorithm
        weights = Weights(policy.modules, None, reference=algorithm.reference, old=algorithm.old, bank=algorithm.bank)
        called = Reward(reward, lambda samples, prompts: earned(samples.squeeze(1)))
        yield Opened(flow_loop(chosen, policy, weights, train_prompts=[Prompt("")], rewards=[called]))


def batch(run: Opened, reward: str, iteration: int, made: Made | None = None) -> Seen:
    """Roll out, unless a batch is given, credit and replay, and take no step."""
    run.done = iteration
    made = made or run.made(iteration)
    before, tree = run.evaluations, made.batch.tree
    signal, weight = replay(run, made)
    chain, ode = paths(tree)
    return Seen(
        signal=signal,
        exact=expectation(run.config, tree, chain, ode, reward=reward),
        weight=weight,
        chain=whole_gradient(chain, reward),
        ode=whole_gradient(ode, reward),
        evaluations=(made.evaluations + run.evaluations - before) / run.config.train.groups,
    )


def replay(run: Opened, made: Made) -> tuple[dict[int, Gradient], dict[int, float]]:
    """Return `signal` and `weight` of `Seen`, of a batch that is credited and replayed; take no step."""
    credited, field = credit(run, made.batch), run.policy.modules["field"]
    step_in_place(run, credited)
    weight, scaled = _weights(credited)
    total = sum(weight.values())
    signal = {
        i: Gradient(*(float(-p.grad[i]) * total / each for p in (field.theta, field.phi))) for i, each in scaled.items()
    }
    return signal, {i: each / total for i, each in scaled.items()}


def _weights(credited: Credited) -> tuple[dict[int, float], dict[int, float]]:
    """Return the weight of each step's edges in the mean of the loss, and the same times that of the step."""
    plain, scaled = defaultdict(float), defaultdict(float)
    for evaluation in credited.tree.evaluations:
        for edges in evaluation.trained:
            own = float((credited.weights(edges) * credited.factors(edges)).sum())
            plain[_step(evaluation.sigma)] += float(credited.weights(edges).sum())
            scaled[_step(evaluation.sigma)] += (
                own * credited.step_weights[edges.move.kernel, evaluation.sigma, edges.sigma_next]
            )
    return plain, scaled


def paths(tree: Tree) -> tuple[list[Step], list[Step]]:
    """Return the sampler's steps as a tree has them, with a kernel where any edge has one; and those by ODE."""
    found = {}
    for evaluation in tree.evaluations:
        for edges in evaluation.edges:
            if edges.move.kernel.stochastic:
                found[_step(evaluation.sigma)] = edges.move
    pairs = list(pairwise(SIGMAS))
    noisy = ode = [step("ode", 0.0, *pair, SIGMAS[1]) for pair in pairs]
    for i, move in found.items():
        own = step(move.kernel.name, move.kernel.level, *pairs[i], SIGMAS[1])
        noisy = [*noisy[:i], replace(own, heat=move.noise_scale), *noisy[i + 1 :]]
    return noisy, ode


def finish(first: int, most: int | None) -> list[Step]:
    """Return ODE steps from a step of the schedule to its end, evenly over its indices if they are to be fewer."""
    left = len(SIGMAS) - 1 - first
    count = min(most or left, left)
    stops = [first + round(left * i / count) for i in range(count + 1)] if left else []
    return [step("ode", 0.0, SIGMAS[i], SIGMAS[j], SIGMAS[1]) for i, j in pairwise(stops)]


def expectation(
    settings: Any, tree: Tree, chain: Sequence[Step], ode: Sequence[Step], *, reward: str
) -> dict[int, Gradient] | None:
    """Return the expected signal of each stochastic step; None where the edges' weights depend on the reward."""
    algorithm, size = settings.algorithm, settings.train.group_size
    rule, own = algorithm.credit, [i for i, each in enumerate(chain) if each.noise > 0]
    finished = getattr(algorithm.tree, "finish", None)
    most = None if finished is None else finished.steps

    def seen(i: int, before: Sequence[Step], after: Sequence[Step]) -> Gradient:
        return gradient(before, chain[i], after, reward)

    whole = {i: seen(i, chain[:i], chain[i + 1 :]) for i in own}
    if rule.name == "terminal":
        found = {i: _times(whole[i], 1 - 1 / size) for i in own}
    elif rule.name == "depthwise":
        found = {i: _times(whole[i], factor) for i, factor in depth_factors(algorithm.tree, tree).items()}
    elif rule.name == "nested":  # all of it, whatever the weights; nothing where an edge has nobody to be compared with
        brush = algorithm.tree.name == "brush"
        valued = {i: seen(i, ode[:i], finish(i + 1, most)) for i in own} if brush else whole
        found = {i: _times(valued[i], float(rule.group > 0 or i in splits(tree))) for i in own}
    elif rule.name == "siblings":
        left = 1.0 if algorithm.baseline.name == "leave_one_out" else 1 - 1 / algorithm.tree.branches
        found = {i: _times(seen(i, ode[:i], finish(i + 1, most)), left) for i in own}
    elif rule.name == "step_gain":
        valued = {i: seen(i, chain[:i], finish(i + 1, algorithm.tree.length)) for i in own}
        if rule.compare == "step":
            found = {i: _times(valued[i], 1 - 1 / size) for i in own}
        else:
            share = 1 / (size * len(own))
            found = {i: _times(valued[i], 1.0, whole[i], -share) for i in own}
    else:
        return None
    return {i: _times(each, _scale(algorithm, chain[i])) for i, each in found.items()}


def depth_factors(shape: Any, tree: Tree) -> dict[int, float]:
    """What is left of an edge's signal when the mean over the nodes of its depth is taken off, itself and siblings in it.

    Noise that is drawn larger than the log-probability supposes is in the reward and in its gradient, so that it is squared.
    """
    nodes, stochastic = Counter(), {}
    for evaluation in tree.evaluations:
        for edges in evaluation.edges:
            nodes[_step(evaluation.sigma)] += len(edges.nodes)
            if edges.move.kernel.stochastic:
                stochastic[_step(evaluation.sigma)] = edges.move
    groups = len({node.root.group for node in tree.nodes})
    found = {}
    for i, move in stochastic.items():
        alike = 1 / (1 + move.sibling_strength**2) if move.sibling_strength is not None else 0.0
        found[i] = move.noise_scale**2 * (1 - (1 + (move.count - 1) * alike) * groups / nodes[i])
    return found


def splits(tree: Tree) -> set[int]:
    """Return the steps at which a state has several children by one kernel."""
    moves = [(evaluation.sigma, edges.move) for evaluation in tree.evaluations for edges in evaluation.edges]
    return {_step(sigma) for sigma, move in moves if move.kernel.stochastic and move.count > 1}


def _scale(algorithm: Any, own: Step) -> float:
    """What the forms of log-probability and objective make of an edge's gradient where the ratio is 1."""
    size = own.sigma - SIGMAS[_step(own.sigma) + 1]
    forms = 2 * own.noise**2 if algorithm.kernel.log_prob == "constant_free" else 1.0
    return forms * (own.noise / size if algorithm.objective.name == "normalised_ratio" else 1.0)


def _times(one: Gradient, factor: float, other: Gradient | None = None, share: float = 0.0) -> Gradient:
    other = other or Gradient(0.0, 0.0)
    return Gradient(factor * one.theta + share * other.theta, factor * one.phi + share * other.phi)


@dataclass(frozen=True, kw_only=True)
class Row:
    """What a preset's update is, beside the exact gradients.

    Attributes:
        size, error: its signal along the expected one; None without an expectation.
        worst, compared: the largest distance from what is expected, in standard errors, and of how many numbers.
        to_chain, to_ode: cosines of the update by theta to the exact gradients; as expected, or else as seen.
        noise: of a group's update by theta over its mean.
    """

    preset: str
    reward: str
    evaluations: float
    size: float | None
    error: float | None
    worst: float | None
    compared: int
    to_chain: float
    to_ode: float
    noise: float


def row(preset: str, reward: str, batches: int | None = None, **overrides: Any) -> Row:
    """Try a preset on some batches, by default as many as its row of the page has."""
    batches = batches or FEWER.get(preset, BATCHES)
    with trainer(preset, reward, **overrides) as run:
        seen = [batch(run, reward, iteration) for iteration in range(batches)]
        groups = run.config.train.groups
    return summary(preset, reward, seen, groups)


def summary(preset: str, reward: str, seen: Sequence[Seen], groups: int) -> Row:
    batches, steps = len(seen), range(len(SIGMAS) - 1)
    update = [[each.weight.get(i, 0.0) * _theta(each.signal.get(i)) for i in steps] for each in seen]
    mean, spread = mean_and_std(update)
    known = seen[0].exact is not None
    aim = [[each.weight.get(i, 0.0) * _theta(each.exact.get(i)) for i in steps] for each in seen] if known else update
    direction = mean_and_std(aim)[0]
    size = error = worst = None
    distances = _distances(seen) if known else []
    if known:
        lengths = [along(own, each) for own, each in zip(update, aim, strict=True)]
        (size,), (error,) = mean_and_std([[each] for each in lengths])
        error, worst = error / math.sqrt(batches), max(map(abs, distances), default=None)
    return Row(
        preset=preset, reward=reward, evaluations=seen[0].evaluations, size=size, error=error, worst=worst,
        compared=len(distances),
        to_chain=cosine(direction[:-1], _mean_theta([each.chain for each in seen])[:-1]),
        to_ode=cosine(direction[:-1], [each.theta for each in seen[0].ode][:-1]),
        noise=math.sqrt(groups * sum(s * s for s in spread) / sum(m * m for m in mean)),
    )  # fmt: skip


def _distances(seen: Sequence[Seen]) -> list[float]:
    """The mean over batches of signal minus expectation, in its standard errors, of each step and parameter."""
    found = []
    for i in range(len(SIGMAS) - 1):
        for name in ("theta", "phi"):
            gaps = [[getattr(s.signal[i], name) - getattr(s.exact[i], name)] for s in seen if i in s.signal]
            if len(gaps) > 2 and any(abs(getattr(s.exact[i], name)) > 1e-12 for s in seen if i in s.signal):
                (mean,), (spread,) = mean_and_std(gaps)
                found.append(mean / (spread / math.sqrt(len(gaps))))
    return found


def mean_and_std(rows: Sequence[Sequence[float]]) -> tuple[list[float], list[float]]:
    table = torch.tensor(rows, dtype=torch.float64)
    return table.mean(0).tolist(), table.std(0, correction=1).tolist()


def along(own: Sequence[float], aim: Sequence[float]) -> float:
    """The length of a vector along another, of which that one has 1."""
    return sum(map(mul, own, aim)) / sum(map(mul, aim, aim))


def _theta(found: Gradient | None) -> float:
    return 0.0 if found is None else found.theta


def _mean_theta(gradients: Sequence[Sequence[Gradient]]) -> list[float]:
    return mean_and_std([[each.theta for each in own] for own in gradients])[0]
