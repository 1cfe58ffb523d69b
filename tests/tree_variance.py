"""How much the gradient of an update varies for what it costs, by its tree, beside that of the tree that adapts.

    python research/oracle_tables.py variance [--reward linear] [--batches 60]

Trees are of the Gaussian flow of `oracle`, by the code of a run, with one kernel. So that all estimate one gradient, each
step's signal is divided by its expectation in that tree and multiplied by the target's: what the brush's children earn by
ODE, times the objective's weight of the step. Then the trace of the covariance by theta of a group's update, over the
square of its mean, times the group's model evaluations: how many evaluations an update of relative variance 1 costs.
"""

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from gaussian_flow import REWARDS, Step, gradient, moments, step
from oracle import SIGMAS, Seen, batch, trainer
from oracle_page import markdown

STEPS = range(len(SIGMAS) - 2)  # stochastic ones
KERNEL = {"algorithm.kernel": {"name": "flow_sde", "level": 0.7}}
FIXED: dict[str, tuple[str, dict[str, Any]]] = {
    "chain of 8": ("flow_grpo", {}),
    "chain of 24": ("flow_grpo", {"train.group_size": 24}),
    "twigs of 8": ("dense_grpo", {}),
    "branch of 16": ("branch_grpo", {}),
    "brush of 3, 4 seeds": ("tempflow", {"algorithm.tree.branches": 3}),
    "brush of 6, 2 seeds": ("tempflow", {}),
    "brush of 12, 1 seed": ("tempflow", {"algorithm.tree.branches": 12}),
    "brush of 6, finished in 4": ("tempflow", {"algorithm.tree.finish": 4}),
}


@dataclass(frozen=True)
class Measured:
    """Of a tree: evaluations of a group, and of each batch by step the signal over its expectation, (batches, steps)."""

    evaluations: float
    groups: int
    signals: torch.Tensor


def ode() -> list[Step]:
    return [step("ode", 0.0, *pair, SIGMAS[1]) for pair in pairwise(SIGMAS)]


def target(reward: str, weights: str) -> list[float]:
    """The gradient by theta that all trees estimate: what each step's children earn by ODE, times its weight."""
    noisy = [step("flow_sde", 0.7, SIGMAS[i], SIGMAS[i + 1], SIGMAS[1]) for i in STEPS]
    shares = [each.noise if weights == "noise_aware" else 1.0 for each in noisy]
    plain = [gradient(ode()[:i], noisy[i], ode()[i + 1 :], reward).theta for i in STEPS]
    return [share * each for share, each in zip(shares, plain, strict=True)]


def of_signals(seen: Sequence[Seen], groups: int) -> Measured:
    cost = sum(each.evaluations for each in seen) / len(seen)
    signals = [[each.signal[i].theta / each.exact[i].theta for i in STEPS] for each in seen]
    return Measured(cost, groups, torch.tensor(signals))


def fixed(name: str, reward: str, batches: int) -> Measured:
    preset, options = FIXED[name]
    with trainer(preset, reward, **KERNEL, **options) as run:
        return of_signals([batch(run, reward, i) for i in range(batches)], run.config.train.groups)


def adaptive(reward: str, batches: int, weights: str, **options: Any) -> tuple[Measured, list[int]]:
    """Try the tree that adapts, from its second shape on; returns also its last shape."""
    chosen = {"algorithm.objective.step_weights": weights, **options}
    with trainer("adaptive", reward, **KERNEL, **chosen) as run:
        first = 2 * run.config.algorithm.tree.every
        seen = [batch(run, reward, i) for i in range(first + batches)][first:]
        return of_signals(seen, run.config.train.groups), run.shaping.algorithm(run.done).tree.profile


def price(measured: Measured, aim: Sequence[float]) -> tuple[float, float]:
    """Return the evaluations that an update of relative variance 1 costs, and their standard error."""
    weights = torch.tensor(aim) ** 2 / sum(a**2 for a in aim)
    batches = len(measured.signals)
    squares = ((measured.signals - measured.signals.mean(0)) ** 2 @ weights) * batches / (batches - 1)
    scale = measured.evaluations * measured.groups
    return scale * float(squares.mean()), scale * float(squares.std()) / batches**0.5


def exact_brush(shape: Sequence[int], aim: Sequence[float]) -> float:
    """What `price` is of a brush of some shape for the linear reward: K children give a Gaussian's covariance by K draws."""
    cost = 2 * len(STEPS) + sum(n * (len(STEPS) - step) for step, n in zip(STEPS, shape, strict=True))
    return cost * sum(a**2 * 2 / (n - 1) for a, n in zip(aim, shape, strict=True)) / sum(a**2 for a in aim)


def exact_chain(size: int, aim: Sequence[float]) -> float:
    """The same of a group of chains, whose reward varies by all noises and covaries with one step's by that alone."""
    noisy = [step("flow_sde", 0.7, SIGMAS[i], SIGMAS[i + 1], SIGMAS[1]) for i in STEPS]
    chain = [*noisy, ode()[-1]]
    own = [(each.noise * math.prod(later.slope for later in chain[i + 1 :])) ** 2 for i, each in enumerate(noisy)]
    spread = sum(a**2 * (moments(chain)[1] + v) / v for a, v in zip(aim, own, strict=True)) / (size - 1)
    return size * (2 * len(STEPS) + 1) * spread / sum(a**2 for a in aim)


def table(reward: str, batches: int) -> Iterator[str]:
    """The trees as a table of Markdown, a column for each weighting of the steps."""
    weightings = ("none", "noise_aware")
    aims = {weights: target(reward, weights) for weights in weightings}
    yield from markdown(("tree", "evaluations", *weightings), ())
    best = dict.fromkeys(weightings, float("inf"))

    def cell(found: tuple[float, float], against: float | None = None) -> str:
        share = "" if against is None else f" ({found[0] / against:.2f})"
        return f"{found[0]:.0f} ± {found[1]:.0f}{share}"

    for name in FIXED:
        found = fixed(name, reward, batches)
        prices = {weights: price(found, aims[weights]) for weights in weightings}
        best = {weights: min(best[weights], prices[weights][0]) for weights in weightings}
        yield f"| {name} | {found.evaluations:.0f} | " + " | ".join(cell(prices[w]) for w in weightings) + " |"
    for branches in (3, 6):
        cells, shapes = [], []
        for weights in weightings:
            found, shape = adaptive(reward, batches, weights, **{"algorithm.tree.branches": branches})
            cells.append(cell(price(found, aims[weights]), best[weights]))
            shapes.append(shape)
        yield f"| adaptive of {branches}: {shapes} | {found.evaluations:.0f} | " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--reward", choices=REWARDS, default="quadratic")
    parser.add_argument("--batches", type=int, default=60)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    for line in table(asked.reward, asked.batches):
        print(line, flush=True)
