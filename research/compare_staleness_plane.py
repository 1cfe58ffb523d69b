"""Compare plain ratios and path ratios on stale rollouts of a velocity field in the plane, where a run takes seconds.

    python research/compare_staleness_plane.py [--seeds 0 1 2] [--staleness 0 1 2 4] [--rates 0.01 0.03]

Prints a table in Markdown for each learning rate: the held-out reward after the last iteration, mean and standard error
over seeds. The model is a network of 122 weights that maps a state in the plane and its sigma to a velocity. A rollout
has 6 steps, of which 5 are stochastic and trained. The reward is exp(-|x - target|^2 / 4). The arms differ in their
objective only; further arms separate the effect of the ratio from that of the clip's width. At staleness 0, with one
optimizer step per iteration, every ratio is 1, so only one arm is run.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import statistics
import tempfile
from typing import Any

import torch
from compare_methods import spread

from flowgrpo import config
from flowgrpo.data.prompts import Prompt
from flowgrpo.flow.pipeline.velocity_field import FieldPolicy
from flowgrpo.flow.trainer import flow_loop
from flowgrpo.training.weights.trained_weights import Weights
from rewards import Reward
from samplers.schedule import linear_sigmas

TARGET = torch.tensor([1.5, -1.0])
ARMS: dict[str, dict[str, Any]] = {
    "clip": {"name": "clip", "clip_range": [0.1, 0.2]},
    "clip, twice as wide": {"name": "clip", "clip_range": [0.2, 0.4]},
    "clip, of nothing": {"name": "clip", "clip_range": [0.99, 99.0]},
    "prefix_ratio": {"name": "prefix_ratio", "clip_range": [0.1, 0.2]},
    "prefix_ratio, power 0": {"name": "prefix_ratio", "clip_range": [0.1, 0.2], "power": 0.0},
    "prefix_ratio, of nothing": {"name": "prefix_ratio", "clip_range": 9.0, "dual": None},
}


class Network(torch.nn.Module):
    """A velocity field in the plane, with the same initial weights in every run."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(5)
            self.layers = torch.nn.Sequential(torch.nn.Linear(3, 20), torch.nn.Tanh(), torch.nn.Linear(20, 2))

    def forward(self, x: torch.Tensor, sigma: torch.Tensor, rows: Any) -> torch.Tensor:
        """Return the velocity (B, 2)."""
        return self.layers(torch.cat([x, sigma[:, None]], dim=1)) + x


def nearness(samples: torch.Tensor, prompts: Any) -> torch.Tensor:
    """Return rewards (B,) between 0 and 1."""
    return torch.exp(-((samples - TARGET) ** 2).sum(1) / 4)


def learnt(objective: dict[str, Any], *, staleness: int, seed: int, rate: float, iterations: int) -> list[float]:
    """Train a run; return its held-out reward before the first iteration and after the last."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        written = {
            "model": {"path": "plane", "lora": None},
            "algorithm": {"preset": "flow_grpo", "kernel": {"log_prob": "sum"}, "objective": objective},
            "train": {"iterations": iterations, "groups": 2, "group_size": 16, "updates": 1, "learning_rate": rate},
            "eval": {"every": iterations, "prompts": 32, "save": 0},
            "run": {"name": "r", "dir": folder, "seed": seed, "staleness": staleness, "checkpoint": {"every": 1000}},
        }
        written["algorithm"]["objective"] = {**objective, "kl": {"beta": 0.0}}
        written["train"]["micro_batch"] = 64
        chosen = config.validate(written)
        policy = FieldPolicy(Network(), (2,), linear_sigmas(6, 3.0))
        prompts = [Prompt(str(number)) for number in range(32)]
        chosen.run.folder.mkdir(parents=True)
        run = flow_loop(
            chosen,
            policy,
            Weights(policy.modules, None, ema=chosen.train.ema),
            rewards=[Reward("nearness", nearness)],
            train_prompts=prompts,
            eval_prompts=prompts,
        )
        run.run()
        return [line["reward/mean"] for line in run.state.report.lines if line["phase"] == "eval"]


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--staleness", nargs="+", type=int, default=[0, 1, 2, 4])
    parser.add_argument("--rates", nargs="+", type=float, default=[0.01, 0.03])
    parser.add_argument("--iterations", type=int, default=20)
    options = parser.parse_args()
    for rate in options.rates:
        print(f"\nlearning rate {rate:g}\n\n| objective | {' | '.join(map(str, options.staleness))} |")
        print(f"|{'---|' * (len(options.staleness) + 1)}")
        fresh: str | None = None  # the cell of staleness 0, shared by all arms
        for arm, objective in ARMS.items():
            cells = []
            for staleness in options.staleness:
                if staleness or fresh is None:
                    numbers = {"staleness": staleness, "rate": rate, "iterations": options.iterations}
                    found = [learnt(objective, seed=seed, **numbers) for seed in options.seeds]
                    cell = spread([after for _, after in found])
                    before = statistics.mean(value for value, _ in found)
                    fresh = fresh if staleness else cell
                cells.append(cell if staleness else fresh)
            print(f"| {arm} | {' | '.join(cells)} |", flush=True)
        print(f"\nbefore: {before:.3f}")


if __name__ == "__main__":
    main()
