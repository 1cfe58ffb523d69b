"""Print the table of docs/research/oracle.md of rewards that late steps decide: trees of final samples beside chains.

python research/oracle_tables.py late [--batches 60]

The flow has two Gaussian numbers. Early steps decide the wide one, the layout, and late steps the narrow one, the detail.
The reward is a weighted sum of both, each over its std. Velocities are exact, with a shift for each step and number.
"""

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from field import credit, step_in_place
from gaussian_flow import Step, moments, step, velocity
from oracle import SIGMAS, trainer
from oracle import _step as step_of
from oracle_page import markdown
from oracle_samples import SEED, between

STDS = (8.0, 0.05)  # of layout and detail
LEVEL, SPLIT = 1.3, 6  # of flow_sde, and the noisy step of the trees
REWARDS = {"detail": (0.0, 1.0), "layout and detail": (1.0, 1.0)}  # weights of the two numbers
TREE = {
    "algorithm.tree": {"name": "branch_window", "size": 0, "siblings": "own", "splits": [SPLIT], "factor": 4},
    "algorithm.kernel": {"name": "flow_sde", "level": LEVEL},
}
LATE = {"algorithm.likelihood.steps": [SPLIT, -1], "algorithm.likelihood.draws": 3}
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "`awm_fast`": ("awm_fast", {"algorithm.likelihood.steps": [1, -1]}),
    "`awm_fast`, late draws": ("awm_fast", LATE),
    "trees, siblings alone": ("awm_split", {**TREE, **LATE, "algorithm.credit": {"group": 0.0, "siblings": 1.0}}),
    "trees, siblings and group": ("awm_split", {**TREE, **LATE}),
}


class Two(torch.nn.Module):
    """The exact velocity of both numbers, with a shift for each step, all 0."""

    def __init__(self):
        super().__init__()
        self.theta = torch.nn.Parameter(torch.zeros(len(SIGMAS) - 1, 2))

    def forward(self, x: torch.Tensor, sigma: torch.Tensor, rows: Any) -> torch.Tensor:
        index = [step_of(level) for level in sigma.tolist()]
        return x * torch.tensor([[velocity(SIGMAS[i], 0.0, std)[0] for std in STDS] for i in index]) + self.theta[index]


def path(std: float, noisy: bool) -> list[Step]:
    """Return the steps of a tree's sample, with the noise of the split or without."""
    steps = [step("ode", 0.0, *pair, SIGMAS[1]) for pair in pairwise(SIGMAS)]
    steps[SPLIT] = step("flow_sde", LEVEL, *SIGMAS[SPLIT : SPLIT + 2], SIGMAS[1])
    return [replace(each, mean=0.0, std=std, heat=float(noisy)) for each in steps]


@dataclass(frozen=True)
class Seen:
    """The update by detail: mean, standard error and noise of each step, and evaluations of a group."""

    mean: torch.Tensor
    error: torch.Tensor
    noise: float  # standard deviation of a group's update over its length
    evaluations: float


def expected(reward: str, scale: float) -> torch.Tensor:
    """Return the update by detail of trees whose samples are compared with their siblings alone.

    Only the own noise of a sample is in the difference to its siblings, and in the velocity error of its draws.
    """
    std, weight = STDS[1], REWARDS[reward][1]
    own = moments(path(std, True))[1] - moments(path(std, False))[1]
    found = torch.zeros(len(SIGMAS) - 1, dtype=torch.float64)
    for i in range(SPLIT, len(SIGMAS) - 2):
        sigma, of_clean = SIGMAS[i], between(SIGMAS[i], SIGMAS[SPLIT])[0]
        of_error = (velocity(sigma, 0.0, std)[0] - 1 / sigma) * of_clean + 1 / sigma
        found[i] = -scale * weight * own * of_error / math.sqrt(moments(path(std, True))[1])
    return found / (len(SIGMAS) - 2 - SPLIT)


def see(method: str, reward: str, batches: int, groups: int = 8) -> Seen:
    """Roll out, credit and score batches of a method, and take no step."""
    preset, options = METHODS[method]
    ends = [math.sqrt(moments(path(std, True))[1]) for std in STDS]

    def earned(x: torch.Tensor) -> torch.Tensor:
        return sum(weight * x[:, i] / ends[i] for i, weight in enumerate(REWARDS[reward]))

    options = {"algorithm.likelihood.weight": "velocity", **SEED, **options}
    found = []
    with trainer(preset, reward, groups=groups, size=2, model=Two(), earned=earned, **options) as run:
        for iteration in range(batches):
            run.done, before = iteration, run.evaluations
            credited = credit(run, run.rollout(iteration, run.groups(iteration)))
            step_in_place(run, credited)
            found.append(-run.policy.modules["field"].theta.grad[:, 1].double())
            evaluations = (run.evaluations - before) / groups
    table = torch.stack(found)
    variance, mean = table.var(0), table.mean(0)
    square = float((mean.square() - variance / batches).sum())
    return Seen(mean, (variance / batches).sqrt(), math.sqrt(groups * float(variance.sum()) / square), evaluations)


def table(batches: int) -> Iterator[str]:
    rows = []
    for method in METHODS:
        seen = [see(method, reward, batches) for reward in REWARDS]
        thousand = [each.noise * math.sqrt(each.evaluations / 1000) for each in seen]
        rows.append([method, f"{seen[0].evaluations:.0f}", *(f"{noise:.2f}" for noise in thousand)])
    yield from markdown(("method", "evaluations", *REWARDS), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=60)
    torch.set_num_threads(1)
    for line in table(parser.parse_args().batches):
        print(line, flush=True)
