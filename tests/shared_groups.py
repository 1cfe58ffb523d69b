"""Runs of few groups, which `test_assignment` makes with one process, with two and with four."""

import tempfile
from pathlib import Path

from accelerate import Accelerator
from field import TARGET, closeness, lines, settings, trainer, weights_of
from torch import distributed

from rewards import Reward


def ranked(samples, prompts):
    """Rank samples by their distance from the first of the group, which no part could tell."""
    return (samples - samples[0]).norm(dim=1).argsort().argsort().double() / len(samples)


ranked.group_wise = True


def two_valued(samples, prompts):
    """Reward 0 or 1: many are alike, and their order decides which are chosen."""
    return (((samples - TARGET) ** 2).sum(1) < 4).double()


def partly_broken(samples, prompts):
    """Give the third of a group no number."""
    values = closeness(samples, prompts).double()
    return [None if len(samples) > 2 and i == 2 else value for i, value in enumerate(values.tolist())]


partly_broken.group_wise = True

CHAIN = {"train__group_size": 8, "train__groups": 1, "train__updates": 2, "train__split": "samples"}
PAIRS = CHAIN | {"train__groups": 4, "train__updates": 1, "train__split": "groups"}
BRUSHES = {"train__group_size": 24, "train__groups": 3, "train__updates": 1, "train__micro_batch": 6}
UNEQUAL = {"train__groups": 2, "train__group_size": 6, "train__updates": 1}
EXTREMES = {"train__select": {"rule": "extremes", "fraction": 0.5}, "train__group_size": 16}
SNAPSHOT = {"preset": "seppo", "likelihood": {"bank": {"every": 1, "keep": 2}}}
CLOSE, RANKED = ("closeness", closeness), ("ranked", ranked)
CASES = {
    "a group of chains": (CHAIN, [CLOSE]),
    "its samples compared": (CHAIN, [RANKED, CLOSE]),
    "with samples that have no reward": (CHAIN, [("partly", partly_broken)]),
    "chosen among equals": (CHAIN | EXTREMES, [("two", two_valued)]),
    "starts chosen by a draft": (CHAIN | {"train__draft": {"pool": 3, "call": {}}}, [CLOSE, RANKED]),
    "brushes": (BRUSHES | {"algorithm": {"preset": "tempflow"}}, [CLOSE, RANKED]),
    "final samples, noised": (CHAIN | {"algorithm": {"preset": "nft"}}, [CLOSE]),
    "final samples about their mean": (CHAIN | {"algorithm": {"preset": "crd"}}, [CLOSE]),
    "final samples in pairs": (PAIRS | {"algorithm": {"preset": "dpo"}}, [CLOSE]),
    "final samples in pairs of a snapshot": (PAIRS | {"algorithm": SNAPSHOT}, [CLOSE]),
    "groups of unequal sizes": (UNEQUAL | {"prompts__pick": {"budget": "knapsack", "worst": -9.0}}, [CLOSE]),
    "hard groups, which get further samples": (
        UNEQUAL | {"train__split": "samples", "prompts__pick": {"second_stage": "equal", "worst": -5.0}},
        [CLOSE],
    ),
    "groups by variance, by quantiles": (
        UNEQUAL | {"prompts__pick": {"budget": "root_variance"}, "algorithm__baseline": "quantile"},
        [CLOSE],
    ),
}


def runs(rank, cases=tuple(CASES)):
    """Return metrics and weights of two iterations of each case."""
    found = {}
    for name in cases:
        choices, rewards = CASES[name]
        folder = Path(tempfile.mkdtemp())
        run = trainer(
            settings(folder, train__iterations=2, run__checkpoint={"every": 2}, **choices),
            steps=3,
            held_out=0,
            rewards=[Reward(reward, each, group_wise=hasattr(each, "group_wise")) for reward, each in rewards],
            accelerator=Accelerator(cpu=True),  # else several processes of a CPU are not connected
        )
        assert run.accelerator.num_processes == distributed.get_world_size()
        run.run()
        found[name] = lines(run), weights_of(run)
    return found
