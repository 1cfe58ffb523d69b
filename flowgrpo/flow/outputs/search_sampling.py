"""Samples of high reward from a flow model: `flowgrpo sample --search`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from flowgrpo.data.embedded import default_call
from flowgrpo.data.prompts import Prompt, Row
from flowgrpo.errors import InputError
from flowgrpo.flow import setup
from flowgrpo.flow.outputs.sampling import build_sampler, limited, load_policy, model_section
from flowgrpo.flow.rollouts.prompt_encoding import build_rows, longest_and_shortest
from flowgrpo.flow.rollouts.search import Searcher, compared_steps
from flowgrpo.training.reports.samples import ModelUse, Sample, Sampler, SearchUse
from flowgrpo.training.scoring import scorer
from rewards.compute import default_device


def search_sampler(use: ModelUse, rows: Sequence[Row], search: SearchUse, batch_size: int) -> tuple[Sampler, Searcher]:
    """Load rewards and a model; return the sampler that searches, and its search, which counts what it costs.

    `batch_size` candidates share a call of the model.

    Raises:
        InputError: as `flowgrpo.flow.outputs.sampling.sampler`, the schedule has no step at which to compare, or `smc` gets
            a reward that compares samples.
        RewardError: a reward does not exist, or fails on synthetic samples.
    """
    model = model_section(use)
    setup.check_model(model)
    model = model.model_copy(update={"call": {**default_call(use.path), **use.call}})
    walks, steps = search.name != "best-of-n", model.call.get("num_inference_steps")
    if walks and isinstance(steps, int):
        compared_steps(search, steps)
    prompts = [Prompt(row.prompt, row.columns) for row in rows]
    rewards, _ = scorer.rewards(search.rewards)
    if search.name == "smc" and (comparing := [reward.name for reward in rewards if reward.group_wise]):
        raise InputError(
            f"--reward: {comparing[0]} compares the candidates of a prompt, and smc weighs each by a reward of its own; "
            "take --search best-of-n or beam"
        )
    if not any(reward.applies(prompt.columns) for reward in rewards for prompt in prompts):
        raise InputError("--reward: no reward applies to any of the prompts; change its map's `only`")
    setup.check_rewards(rewards, prompts, model)
    policy = load_policy(use, rows)
    if walks:
        policy.check(build_rows(longest_and_shortest(prompts)), "call")
        compared_steps(search, len(policy.sigmas) - 1)
    for reward in rewards:
        reward.to(default_device())
    columns = [prompt.columns for prompt in setup.with_sampling_rate(prompts, policy)]
    rows = [replace(row, columns=own) for row, own in zip(rows, columns, strict=True)]
    searcher = Searcher(policy, search, rewards, batch_size)

    def generate(part: Sequence[Row]) -> list[Sample]:
        with limited(policy, use):
            return searcher.search(part)

    return replace(build_sampler(policy, rows, generate, "sde" if walks else "ode"), search=search), searcher
