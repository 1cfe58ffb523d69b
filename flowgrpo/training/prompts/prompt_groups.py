"""The groups of an iteration: prompts, numbers of roots and loss weights."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from flowgrpo.data.prompts import shuffle
from flowgrpo.schema.schedule import Pick
from flowgrpo.schema.sections import RunConfig
from flowgrpo.training.advantages import unit_selection
from flowgrpo.training.prompts.prompt_statistics import PromptStats
from samplers import noise


@dataclass(frozen=True)
class Groups:
    """The G groups of one iteration, over all processes."""

    prompts: list[int]  # index of each group's training prompt
    roots: list[int]  # number of roots of each group, in both stages
    weights: torch.Tensor  # (G,) loss weights of their samples
    # Number of roots of each group in the first stage; the second one samples the others. None before a second stage.
    first: list[int] | None = None


def build_groups(config: RunConfig, number: int, prompt_stats: PromptStats, iteration: int) -> Groups:
    """Choose the groups of an iteration from `number` training prompts, by `prompts.pick`; the same on all processes."""
    pick, train, seed = config.prompts.pick, config.train, config.run.seed
    if pick.by == "variance":
        generator = noise.generator(seed, "prompts", iteration)
        indices = unit_selection.most_uncertain(
            *_count_solved(pick, prompt_stats, range(number), iteration), train.groups, generator
        )
    else:
        indices = shuffle(number, train.groups, seed, iteration)
    count, total = _count_solved(pick, prompt_stats, indices, iteration)
    chance = (1 + total) / (2 + count)
    roots = config.algorithm.roots(train.group_size)
    sizes = [roots] * len(indices)
    if pick.budget != "equal":
        fewest = 2 if roots == train.group_size else 1  # a chain needs another one to be compared with
        bounds = max(fewest, round(pick.least * roots)), round(pick.most * roots)
        if pick.budget == "knapsack":
            sizes = unit_selection.knapsack(chance, sum(sizes), *bounds)
        else:
            sizes = unit_selection.root_variance(prompt_stats.variances(indices, iteration), sum(sizes), *bounds)
    weights = unit_selection.robust_weights(1 - chance, pick.robust)
    if pick.budget == "root_variance":  # it makes the error of a mean over prompts small, whatever their sizes
        weights = weights * roots / torch.tensor(sizes)
    return Groups(indices, sizes, weights)


def add_second_stage(config: RunConfig, groups: Groups, rewards: Iterable[tuple[int, float]]) -> Groups:
    """Return the groups with the roots of a second stage, by `prompts.pick.second_stage`.

    `rewards` are (group, total reward) of all samples of the first stage, in an order that does not depend on the number of
    processes. Those that are not finite are skipped, and a group of lost samples gets no further ones. A tree counts as all
    of its samples, so the number of further trees is rounded up.
    """
    pick, train = config.prompts.pick, config.train
    stage = pick.second_stage
    assert stage is not None, "only runs with a second stage call this"
    known: dict[int, list[float]] = defaultdict(list)
    for group, reward in rewards:
        if math.isfinite(reward):
            known[group].append(reward)
    leaves = train.group_size // config.algorithm.roots(train.group_size)
    sizes = []
    for group, roots in enumerate(groups.roots):
        mean = sum(known[group]) / len(known[group]) if known[group] else pick.best
        p = (mean - pick.worst) / (pick.best - pick.worst)
        sizes.append(min(roots + math.ceil(stage.further(p, roots * leaves) / leaves), stage.largest(roots)))
    return replace(groups, roots=sizes, first=groups.roots)


def _count_solved(
    pick: Pick, prompt_stats: PromptStats, indices: Sequence[int], iteration: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the discounted number of samples of each prompt, and the number that count as solved, (P,) each.

    Rewards are mapped from [`pick.worst`, `pick.best`] to [0, 1], so a sample can be solved in part.
    """
    count, total = prompt_stats.counts(indices, iteration)
    return count, ((total - pick.worst * count) / (pick.best - pick.worst)).clamp(min=0).minimum(count)
