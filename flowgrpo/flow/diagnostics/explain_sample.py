"""Explanation of a sample of a run, with the weights of a checkpoint (`flowgrpo explain`)."""

from __future__ import annotations

from pathlib import Path

from flowgrpo.data import conditions, prompts
from flowgrpo.data.prompts import Row
from flowgrpo.errors import InputError
from flowgrpo.flow import setup
from flowgrpo.flow.config import Config
from flowgrpo.flow.diagnostics.counterfactual import Explanation, explain
from flowgrpo.flow.model import initial_lora, memory_estimate
from flowgrpo.flow.pipeline import guidance
from flowgrpo.flow.pipeline.policy import DiffusersPolicy
from flowgrpo.training.checkpoints import checkpoint
from flowgrpo.training.lora import lora_files
from flowgrpo.training.run.phases import phase
from flowgrpo.training.scoring import scorer
from rewards.compute import default_device


def explain_sample(
    settings: Config, run: Path, found: Path, *, prompt: int, seed: int | None, redraws: int, chains: int
) -> Explanation:
    """Explain a sample with the weights of the checkpoint `found` (the average of weights, if it is saved there).

    `prompt` is the index of a held-out prompt. `seed` is the seed of the initial noise; None: the one of evaluations. Raises
    InputError if there is no such prompt, a reward is group-wise, or the model cannot be loaded; raises RewardError if a
    reward fails.
    """
    setup.check_model(settings.model)
    held_out = prompts.load_split(settings.prompts, "eval")
    if not held_out:
        raise InputError(f"{run}: it has no held-out prompts (prompts.eval) to explain")
    if not 0 <= prompt < len(held_out):
        raise InputError(f"--prompt: the run has held-out prompts 0 to {len(held_out) - 1}, there is no {prompt}")
    rewards, _ = scorer.rewards(settings.rewards)
    for reward in rewards:
        if reward.group_wise:
            raise InputError(
                f"explain: the reward {reward.name!r} compares the samples of a group, and a sample alone has none"
            )
    settings = lora_files.with_kept_lora(settings, run)
    without = {"attention": None, "compile": False}  # these settings fit the training machine, maybe not this one
    settings = settings.model_copy(update={"model": settings.model.model_copy(update=without)})
    chosen = held_out[prompt]
    setup.check_rewards(rewards, [chosen], settings.model)
    device = default_device()
    begun = initial_lora.adapters(settings.model)
    memory_estimate.check(settings, device, begun)
    row = Row(chosen.text, prompt if seed is None else seed, chosen.columns)

    def encode(policy: DiffusersPolicy) -> None:
        conditions.check([row.columns], policy.takes, "prompts.eval")
        with policy.call_overrides(**guidance.training_call(settings.model.guidance, policy)):
            policy.prepare([row])

    with phase("loading"):
        policy, weights = setup.policy_and_weights(settings, device, encode, begun, learns=False)
    with phase("rewards"):
        for reward in rewards:
            reward.to(device)
    step = checkpoint.load_averaged(found, weights)
    (with_rate,) = setup.with_sampling_rate([chosen], policy)
    row = Row(row.prompt, row.seed, with_rate.columns)
    with policy.call_overrides(**guidance.training_call(settings.model.guidance, policy)):
        policy.check([row])
        policy.offload()
        state, counts = checkpoint.rollout_state(found), {"redraws": redraws, "chains": chains}
        return explain(settings, policy, rewards, row, iteration=step, rollout_state=state, **counts)
