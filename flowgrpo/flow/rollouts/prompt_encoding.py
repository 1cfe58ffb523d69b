"""Encode a run's prompts before its networks are loaded, for each set of call arguments that the run uses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import torch

from flowgrpo.data.prompts import Prompt, Row
from flowgrpo.flow.config import Config
from flowgrpo.flow.pipeline import guidance
from flowgrpo.flow.pipeline.policy import Policy
from flowgrpo.training.distributed.assignment import assign_pool, assign_roots
from flowgrpo.training.distributed.data_shard import WHOLE, DataShard
from flowgrpo.training.prompts.prompt_groups import build_groups
from flowgrpo.training.prompts.prompt_statistics import PromptStats


@torch.no_grad()
def encode_run(
    policy: Policy,
    config: Config,
    train_prompts: Sequence[Prompt],
    eval_prompts: Sequence[Prompt],
    *,
    device: torch.device,
    done: int = 0,
    shards: Sequence[DataShard] = (WHOLE,),
    rolls_out: bool = True,
) -> None:
    """Encode the training prompts that a process will sample, if it `rolls_out`, and its evaluation prompts.

    If the text encoders stay on `device`, texts are encoded when they are first sampled, and only the longest and the
    shortest here, with all prompts that have conditions, such as a picture. `shards` are the data shards of the process:
    one, or several for a generator. `done` iterations precede a resume.
    """
    after = config.model.text_encoders
    stay = after == "keep" or (after == "offload" and device.type == "cpu")

    def due(prompts: Sequence[Prompt]) -> list[Prompt]:
        return [prompt for prompt in prompts if not stay or policy.takes & prompt.columns.keys()]

    ahead: list[Prompt] = []
    if rolls_out and due(train_prompts):
        ahead = due([train_prompts[i] for i in indices_ahead(config, len(train_prompts), done=done, shards=shards)])
    rows = build_rows([*longest_and_shortest(train_prompts), *ahead])
    evaluation = eval_call(config, policy)
    with policy.call_overrides(**guidance.training_call(config.model.guidance, policy)):
        policy.prepare(rows)
        for call, key in further_calls(config, policy):
            with policy.call_overrides(**call):
                policy.prepare(rows, key)
    held_out = longest_and_shortest(eval_prompts)
    for shard in shards:
        held_out += due(eval_prompts[shard.index :: shard.count])
    with policy.call_overrides(**evaluation):
        policy.prepare(build_rows(held_out), "eval.call" if config.eval.call else "model.call")


def further_calls(config: Config, policy: Policy) -> list[tuple[dict[str, Any], str]]:
    """Return the calls under which training prompts are encoded beside that of the rollout.

    Each is given by the arguments that differ, with their config key; they go over the rollout's arguments.
    """
    calls: list[tuple[dict[str, Any], str]] = []
    if config.model.guidance == "rollout":
        calls.append((guidance.update_call(config.model.guidance, policy), "model.call"))
    if config.train.draft is not None:
        calls.append((config.train.draft.call, "train.draft.call"))
    return calls


def count_prompts(config: Config, *, train: int, held_out: int) -> tuple[int, int]:
    """Return how many of a run's training and held-out prompts one process encodes, at most.

    A generator encodes those of all trainers that it serves.
    """
    shards, section = config.run.shards, config.train
    samplers = min(shards, config.run.generators or shards)
    drawn = train
    if config.prompts.pick.by == "shuffle":
        roots = section.groups * config.algorithm.roots(section.group_size)
        all_may_come = config.prompts.pick.second_stage is not None or section.draft is not None
        groups = section.groups if all_may_come else min(section.groups, -(-roots // samplers))
        rounds = 0 if config.algorithm.kernel.calibrate is None else config.algorithm.kernel.calibrate.rounds
        drawn = min(train, groups * (section.iterations + rounds))
    return drawn, -(-held_out // (config.run.evaluators or shards))


def eval_call(config: Config, policy: Policy) -> dict[str, Any]:
    """Return the call arguments by which evaluation differs from training: guidance of `model.call`, and `eval.call`."""
    guided = {name: policy.call.get(name) for name in guidance.training_call(config.model.guidance, policy)}
    return {**guided, **config.eval.call}


def changed_arguments(call: Mapping[str, Any], policy: Policy) -> set[str]:
    """Return the names of the arguments in `call` that differ from the policy's, except the number of steps."""
    return {key for key, value in call.items() if policy.call.get(key) != value} - {"num_inference_steps"}


def indices_ahead(config: Config, number: int, *, done: int, shards: Sequence[DataShard]) -> list[int]:
    """Return the indices of the training prompts that a process will sample, without repeats.

    `number` is the number of training prompts; other arguments are those of `encode_run`.
    """
    if config.prompts.pick.by != "shuffle":
        return list(range(number))  # the choice is not known yet
    settings, stats = config.algorithm.kernel.calibrate, PromptStats(config.train.half_life)
    before = 0 if settings is None or done else settings.rounds  # calibration rounds before the first iteration
    ahead = range(done - before, config.train.iterations)
    indices: dict[int, None] = {}  # an ordered set
    for iteration in ahead:
        groups = build_groups(config, number, stats, iteration)
        for assign, shard in product((assign_roots, assign_pool), shards):
            assignment = assign(config, groups, iteration=iteration, shard=shard)
            indices |= dict.fromkeys(groups.prompts[group] for group, _ in assignment.own)
        if config.prompts.pick.second_stage is not None:  # whose roots may be of any group
            indices |= dict.fromkeys(groups.prompts)
    return list(indices)


def longest_and_shortest(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Return the longest and the shortest prompt; [] if there are none."""
    if not prompts:
        return []
    return [max(prompts, key=lambda p: len(p.text)), min(prompts, key=lambda p: len(p.text))]


def build_rows(prompts: Sequence[Prompt]) -> list[Row]:
    """Return one row for each prompt, prompt i with seed i."""
    return [Row(prompt.text, i, prompt.columns) for i, prompt in enumerate(prompts)]
