"""Sampled, scored and stored groups, which runs train on later (`data.groups`)."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from flowgrpo.data import conditions, stored
from flowgrpo.data.prompts import Prompt, Row
from flowgrpo.errors import InputError
from flowgrpo.flow import setup
from flowgrpo.flow.config import Config
from flowgrpo.flow.methods import likelihood_rules
from flowgrpo.flow.offline.model_fingerprint import fingerprint
from flowgrpo.flow.pipeline import guidance
from flowgrpo.flow.pipeline.policy import DiffusersPolicy
from flowgrpo.flow.planning.plan import call_and_branches
from flowgrpo.flow.rollouts.rollout import rollout
from flowgrpo.training.run.phases import phase
from flowgrpo.training.scoring.scorer import Scores
from rewards import Reward
from rewards.compute import default_device
from samplers import noise
from samplers.batches import batched
from samplers.kernels import State
from samplers.trees import Root, Tree


def sample_groups(config: Config, prompts: Sequence[Prompt], rewards: Sequence[Reward], folder: Path) -> dict[str, Any]:
    """Sample, score and store one group per prompt, as the first iteration of a run would; return the manifest.

    Group i belongs to prompt i and has the seeds and noise of group i of iteration 0. A folder of an interrupted call is
    continued.

    Raises:
        InputError: the config's trees are no chains, the model cannot be sampled, or the folder holds something else.
        RewardError: a reward fails on synthetic samples.
    """
    check(config)
    setup.check_rewards(rewards, prompts, config.model)
    size, seed, rows = config.train.group_size, config.run.seed, config.train.rollout_rows
    writer = stored.Writer(folder, about(config, prompts), [reward.name for reward in rewards])
    left = list(range(writer.done, len(prompts)))
    policy = _policy(config, prompts)
    for reward in rewards:
        reward.to(default_device())
    whole = setup.with_sampling_rate(prompts, policy)
    with policy.call_overrides(**guidance.training_call(config.model.guidance, policy)):
        policy.start([Row(whole[0].text, 0, whole[0].columns)])  # sets the sigmas
        kernels = config.algorithm.kernel.kernels(len(policy.sigmas) - 1)
        plan = config.algorithm.plan(kernels, size, seed, 0)
        with phase("sampling", len(left)) as sampling:
            for numbers in batched(left, max(1, rows // size)):
                tree, scores = rollout(
                    policy,
                    plan,
                    [root for number in numbers for root in _roots(config, whole[number], number)],
                    rewards=rewards,
                    micro_batch=rows,
                    seed=seed,
                    iteration=0,
                )
                writer.add(list(_groups(tree, scores, prompts)))
                sampling.advance(len(numbers))
        return writer.finish({"sigmas": policy.sigmas})


def check(config: Config) -> None:
    """Raise InputError for a config with trees other than chains, with calibration, or with a draft."""
    algorithm = config.algorithm
    if algorithm.tree.name not in likelihood_rules.CHAINS:
        raise InputError(f"algorithm.tree: groups are the ends of chains, not of {algorithm.tree.name}; take chain")
    if algorithm.kernel.calibrate is not None:
        raise InputError(
            "algorithm.kernel.calibrate: a run calibrates before it trains, and nothing trains here; take null"
        )
    if config.train.draft is not None:
        raise InputError("train.draft: stored groups are whole, a run may take a part of them; take null")


def about(config: Config, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """Return the manifest's description of stored samples: the model, the call, the prompts and the sampling."""
    listed = [[prompt.text, prompt.columns] for prompt in prompts]
    return {
        "kind": "samples",
        **of_model(config),
        "guidance": config.model.guidance,
        "lora": None if config.model.lora is None else config.model.lora.path,
        "tree": config.algorithm.tree.model_dump(mode="json"),
        "kernel": config.algorithm.kernel.model_dump(mode="json"),
        "scored_by": [use.model_dump(mode="json") for use in config.rewards],
        "seed": config.run.seed,
        "groups": len(prompts),
        "group_size": config.train.group_size,
        "prompts": hashlib.sha256(json.dumps(listed, default=str).encode()).hexdigest(),
    }


def of_model(config: Config) -> dict[str, Any]:
    """Return the settings that a run must share with stored samples to train on them: model, precision and call."""
    return {
        "model": config.model.path,
        "fingerprint": fingerprint(config.model.path, config.model.variant),
        "dtype": config.model.dtype,
        "call": call_and_branches(config)[0],
    }


def _policy(config: Config, prompts: Sequence[Prompt]) -> DiffusersPolicy:
    def encode(policy: DiffusersPolicy) -> None:
        conditions.check((prompt.columns for prompt in prompts), policy.takes, "prompts.train")
        with policy.call_overrides(**guidance.training_call(config.model.guidance, policy)):
            policy.prepare([Row(prompt.text, 0, prompt.columns) for prompt in prompts])

    return setup.policy_and_weights(config, torch.device(default_device()), encode, learns=False)[0]


def _roots(config: Config, prompt: Prompt, number: int) -> list[Root]:
    shared, seed = config.algorithm.tree.start == "shared", config.run.seed
    starts = [0 if shared else start for start in range(config.algorithm.roots(config.train.group_size))]
    seeds = [noise.seed(seed, "start", 0, number, start) for start in starts]
    return [Root(number, index, Row(prompt.text, own, prompt.columns)) for index, own in enumerate(seeds)]


def _groups(tree: Tree, scores: Scores, prompts: Sequence[Prompt]) -> Iterator[tuple[stored.Group, State]]:
    by_group: dict[int, list[int]] = defaultdict(list)
    for leaf, node in enumerate(tree.leaves):
        by_group[tree.nodes[node].root.group].append(leaf)
    for number, leaves in sorted(by_group.items()):
        leaves.sort(key=lambda leaf: tree.nodes[tree.leaves[leaf]].path)
        seeds = [tree.nodes[tree.leaves[leaf]].root.row.seed for leaf in leaves]
        group = stored.Group(
            prompt=prompts[number], seeds=seeds, rewards=scores.values[leaves], lost=scores.lost[leaves]
        )
        yield group, tuple(x[leaves] for x in tree.samples)
