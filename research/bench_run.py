"""Measure costs of a run besides its models: rewards during decoding, two processes instead of one, and the start.

    OMP_NUM_THREADS=1 python research/bench_run.py [--rounds 5] [--json FILE] [--only rewards|sampling|processes|start]

 - `rewards`: wall seconds of decoding and scoring samples of the embedded model at once, group by group, over those of
   decoding all samples first. One reward computes on this machine for as long as decoding takes. Another waits for as long,
   like a reward that is served elsewhere.
 - `sampling`: wall seconds of a rollout of the embedded model that scores groups while it samples others, over one that
   scores them after all are sampled; in calls of one and of four of 8 groups. The reward waits as long as sampling takes.
 - `processes`: wall seconds of an iteration of `configs/shapes.yaml` in two processes over those in one: at best one half,
   on a machine with a core for each. The start is excluded, by the difference of a long and a short run.
 - `start`: CPU seconds of commands over those of a process that only imports PyTorch.

The last two also give the ratio of peak resident memory, of the largest process. Prints a table in Markdown.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import paired
import torch
from paired import Ratio, Spent, Work

from flowgrpo.data.prompts import Row
from flowgrpo.flow.pipeline.loading.load import load_pipeline
from flowgrpo.flow.pipeline.policy import DiffusersPolicy
from flowgrpo.flow.rollouts.rollout import rollout
from flowgrpo.training.scoring.group_scores import Piece, score_pieces
from rewards import Reward
from samplers.kernels import ODE, Kernel
from samplers.plans import chain
from samplers.trees import Root

GROUPS, SIZE = 8, 8  # groups, and samples of each
CHAINS = 4  # samples of each group in `sampling`
ITERATIONS = 4  # further iterations of the long run
QUIET = ("eval.every=100000", "eval.prompts=1", "eval.save=0", "run.checkpoint.every=100000", "run.trees=null")
COMMANDS = {"--help": ["--help"], "plan of configs/shapes.yaml": ["plan", "configs/shapes.yaml"]}


def waiting(seconds: float, *, remote: bool = True) -> Reward:
    """Return a reward that waits `seconds` per sample, as if another machine computed it; `remote`: and as if it said so."""

    def function(samples: torch.Tensor, rows: Sequence[Row]) -> list[float]:
        time.sleep(seconds * len(samples))
        return [0.0] * len(samples)

    function.remote = remote
    return Reward("waiting", function)


def computing(work: Work) -> Reward:
    """Return a reward of this machine that does some work in each call."""

    def function(samples: torch.Tensor, rows: Sequence[Row]) -> list[float]:
        work()
        return [0.0] * len(samples)

    return Reward("computing", function)


def shapes() -> DiffusersPolicy:
    """Return the embedded model with short chains."""
    settings = {"num_inference_steps": 10, "guidance_scale": 1.0, "height": 64, "width": 64}
    return DiffusersPolicy(load_pipeline("shapes", torch.float32), settings)


def rewards(rounds: int) -> dict[str, Ratio]:
    """Return the ratios of decoding and scoring at once to one after the other."""
    policy = shapes()
    other = load_pipeline("shapes", torch.float32).vae  # a second decoder, since it works in another thread
    asked = [[Row("a red circle", SIZE * group + i) for i in range(SIZE)] for group in range(GROUPS)]
    states = [policy.start(rows) for rows in asked]

    def decode(group: int) -> torch.Tensor:
        with torch.no_grad():
            return policy.decode(states[group], asked[group])

    def as_long() -> None:
        with torch.no_grad():
            other.decode(states[0][0])

    def pieces():
        return (Piece(group, range(SIZE), decode(group), asked[group]) for group in range(GROUPS))

    alone = min(paired.wall(lambda: list(pieces())) for _ in range(3))
    found = {}
    for name, reward in {
        "a reward that waits": waiting(alone / GROUPS / SIZE),
        "a reward that computes": computing(as_long),
    }.items():
        works = {
            "at once": lambda reward=reward: score_pieces([reward], pieces()),
            "in turn": lambda reward=reward: score_pieces([reward], iter(list(pieces()))),
        }
        taken = paired.in_turns(works, rounds, paired.wall)
        found[f"decoding and {name}: at once / one after the other"] = paired.paired(taken["at once"], taken["in turn"])
    return found


def sampling(rounds: int) -> dict[str, Ratio]:
    """Return the ratios of rollouts that score groups while they sample others to rollouts that score them afterwards."""
    policy, kernels = shapes(), [Kernel(level=0.7)] * 9
    rows = [[Row("a red circle", CHAINS * group + i) for i in range(CHAINS)] for group in range(GROUPS)]
    roots = [Root(group, i, row) for group, own in enumerate(rows) for i, row in enumerate(own)]

    def rolled(groups: int, reward: Reward) -> None:
        plan = chain([*kernels, ODE], range(9), range(9))
        rollout(policy, plan, roots, rewards=[reward], micro_batch=groups * CHAINS, seed=0, iteration=0)

    found = {}
    for groups in (1, 4):
        alone = min(paired.wall(partial(rolled, groups, waiting(0.0))) for _ in range(2))
        works = {
            name: partial(rolled, groups, waiting(alone / len(roots), remote=remote))
            for name, remote in {"while": True, "after": False}.items()
        }
        taken = paired.in_turns(works, rounds, paired.wall)
        name = f"rollout, {groups} of {GROUPS} groups a call: scored while sampling / after it"
        found[name] = paired.paired(taken["while"], taken["after"])
    return found


def command(arguments: Sequence[str]) -> Spent:
    """Run Python in a process; raises SystemExit if it fails."""
    return paired.spent([sys.executable, *arguments])


def trained(processes: int, iterations: int) -> Spent:
    """Train a run."""
    with tempfile.TemporaryDirectory() as folder:
        keys = [f"run.processes={processes}", f"train.iterations={iterations}", f"run.dir={folder}", "run.name=run"]
        return command(["-m", "flowgrpo", "train", "configs/shapes.yaml", *QUIET, *keys])


def processes(rounds: int) -> dict[str, Ratio]:
    """Return the ratios of an iteration in two processes to one in one process, and of the memory of the longer runs."""
    works = {(count, length): partial(trained, count, length) for count in (1, 2) for length in (1, 1 + ITERATIONS)}
    taken = paired.in_turns(works, rounds, lambda run: run())
    longer = {count: taken[count, 1 + ITERATIONS] for count in (1, 2)}
    each = {
        count: [long.wall - short.wall for short, long in zip(taken[count, 1], longer[count], strict=True)]
        for count in (1, 2)
    }
    return {
        "iteration of configs/shapes.yaml: two processes / one": paired.paired(each[2], each[1]),
        "peak memory of configs/shapes.yaml: larger of two processes / one": peaks(longer[2], longer[1]),
    }


def peaks(first: Sequence[Spent], second: Sequence[Spent]) -> Ratio:
    """Return the ratio of the peak memory of two works in each round."""
    return paired.paired([each.peak for each in first], [each.peak for each in second])


def start(rounds: int) -> dict[str, Ratio]:
    """Return the ratios of commands to the import of PyTorch, in CPU seconds and in peak memory."""
    works: dict[str, Work] = {"torch": partial(command, ["-c", "import torch"])}
    works |= {name: partial(command, ["-m", "flowgrpo", *words]) for name, words in COMMANDS.items()}
    taken = paired.in_turns(works, rounds, lambda run: run())
    found = {}
    for name in COMMANDS:
        own, least = ([each.cpu for each in taken[key]] for key in (name, "torch"))
        found[f"flowgrpo {name} / import torch"] = paired.paired(own, least)
        found[f"peak memory of flowgrpo {name} / import torch"] = peaks(taken[name], taken["torch"])
    return found


PARTS: dict[str, Callable[[int], dict[str, Ratio]]] = {
    "rewards": rewards,
    "sampling": sampling,
    "processes": processes,
    "start": start,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = paired.parser(__doc__, rounds=5)
    parser.add_argument("--only", action="append", choices=list(PARTS), help="all, unless some are named")
    options = parser.parse_args(arguments)
    os.chdir(Path(__file__).parents[1])  # which holds configs/
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for part in options.only or PARTS:
        found |= PARTS[part](options.rounds)
        paired.keep(found, options)
    paired.tell(found, options)


if __name__ == "__main__":
    main()
