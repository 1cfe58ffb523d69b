"""Training on stored groups (`data.groups`) in place of rollouts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flowgrpo.data import stored
from flowgrpo.data.prompts import Row
from flowgrpo.data.stored import KEY, Stored
from flowgrpo.errors import InputError
from flowgrpo.flow.config import Config
from flowgrpo.flow.offline.model_fingerprint import fingerprint
from flowgrpo.flow.rollouts.rollout import Batch
from flowgrpo.training.advantages.reward_combination import Combination
from flowgrpo.training.distributed.assignment import Assignment, assign_minibatches
from flowgrpo.training.prompts.prompt_groups import Groups
from flowgrpo.training.scoring.scorer import Scores
from samplers import noise
from samplers.trees import TRUNK, Node, Root, Tree


@dataclass(frozen=True, kw_only=True)
class Source:
    """Stored groups of a run: group i belongs to training prompt i."""

    config: Config
    stored: Stored
    names: list[str]  # names of the R trained rewards
    combination: Combination  # how the rewards are combined
    columns: list[int]  # R indices among the stored rewards

    def batch(
        self, groups: Groups, assignment: Assignment, sigmas: Sequence[float], *, iteration: int, device: torch.device
    ) -> Batch:
        """Return this process's samples of an iteration with their scores, each as a leaf one edge below its root.

        If a stored group has more samples than the run's group size, each iteration draws a subset.
        """
        own, parts = assignment.own, assign_minibatches(self.config, groups, iteration)
        members = {group: self._members(groups, group, iteration) for group in dict.fromkeys(group for group, _ in own)}
        picks = [(groups.prompts[group], members[group][index]) for group, index in own]
        roots = []
        for (group, index), (number, member) in zip(own, picks, strict=True):
            stored_group = self.stored.groups[number]
            row = Row(stored_group.prompt.text, stored_group.seeds[member], stored_group.prompt.columns)
            roots.append(Root(group, index, row, parts[group][index]))
        last = len(sigmas) - 1
        tree = Tree(tuple(sigmas), [Node(None, root, (root.index,), TRUNK, sigmas[0], 0) for root in roots])
        tree.nodes += [Node(i, root, (root.index,), TRUNK, 0.0, last) for i, root in enumerate(roots)]
        tree.leaves = list(range(len(roots), 2 * len(roots)))
        tree.samples = tuple(x.to(device) for x in self.stored.latents(picks))
        members_of = [(self.stored.groups[number], member) for number, member in picks]
        values = torch.stack([stored_group.rewards[member, self.columns] for stored_group, member in members_of])
        lost = torch.stack([stored_group.lost[member] for stored_group, member in members_of])
        return Batch(groups, tree, Scores(values, lost, 0.0), 0, stored=True)

    def _members(self, groups: Groups, group: int, iteration: int) -> list[int]:
        size, available = groups.roots[group], len(self.stored.groups[groups.prompts[group]].seeds)
        if size == available:
            return list(range(available))
        return noise.generator(self.config.run.seed, "members", iteration, group).permutation(available)[:size].tolist()


def load_source(config: Config) -> Source | None:
    """Return the stored groups of a run, None without any; raise InputError if they are too small or lack a reward."""
    if config.data.groups is None:
        return None
    groups, size = stored.read(Path(config.data.groups)), config.train.group_size
    smallest = min(len(group.seeds) for group in groups.groups)
    if size > smallest:
        raise InputError(
            f"train.group_size: {size} is more than the {smallest} samples of a group in {config.data.groups}; take "
            "that or less"
        )
    if config.data.rewards:
        named = [("data.rewards", name, weight, 0.0) for name, weight in config.data.rewards.items()]
    else:
        uses = zip(config.reward_names, config.rewards, strict=True)
        named = [("rewards", name, use.weight, use.offset) for name, use in uses]
    scale, offset = (torch.tensor([each[i] for each in named], dtype=torch.float64) for i in (2, 3))
    return Source(
        config=config,
        stored=groups,
        names=[name for _, name, *_ in named],
        combination=Combination(config.algorithm.baseline.combine, config.algorithm.baseline.caution, scale, offset),
        columns=[stored.column_of(groups.rewards, name, key) for key, name, *_ in named],
    )


def check_model(config: Config, source: Source | None, call: dict[str, Any]) -> None:
    """Raise InputError if the model, its precision or a call argument differs from that of the stored samples."""
    if source is None:
        return
    manifest, place = source.stored.manifest, f"{KEY}: {config.data.groups} has samples of"
    if manifest["fingerprint"] != fingerprint(config.model.path, config.model.variant):
        raise InputError(
            f"{place} another model ({manifest['model']}) than {config.model.path}; train that, or sample this one"
        )
    if manifest["dtype"] != config.model.dtype:
        raise InputError(f"{place} a model in {manifest['dtype']}; set model.dtype={manifest['dtype']}")
    now = json.loads(json.dumps(call))
    for key in sorted({*manifest["call"], *now}):
        before = manifest["call"].get(key)
        if before != now.get(key):
            raise InputError(
                f"{place} a call with {key} {before!r}, and model.call has {now.get(key)!r}; take {before!r}"
            )
