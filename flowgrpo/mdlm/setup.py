"""What a run of a masked-diffusion language model needs before its first iteration: checks, then the model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from accelerate import Accelerator

from flowgrpo.data.prompts import Prompt
from flowgrpo.mdlm import memory
from flowgrpo.mdlm.checkpointing import checkpoint_gradients
from flowgrpo.mdlm.config import TextConfig, TextModel
from flowgrpo.mdlm.loading import load_predictor
from flowgrpo.mdlm.policy import TextPolicy
from flowgrpo.mdlm.solutions import check_hints
from flowgrpo.mdlm.trainer import TextTrainer
from flowgrpo.training.scorer import tried
from flowgrpo.training.weights import Weights, lora_config
from rewards import Reward
from rewards.compute import DTYPES

SYNTHETIC = "<answer>1 + 2</answer>"


def check(
    settings: TextConfig,
    *,
    train_prompts: Sequence[Prompt],
    eval_prompts: Sequence[Prompt],
    rewards: Sequence[Reward],
    eval_rewards: Sequence[Reward],
) -> None:
    """Refuse what can be refused without the model.

    Raises:
        InputError: hints are wanted, and no training prompt has a solution.
        RewardError: a reward fails on a synthetic text.
    """
    check_hints(settings, train_prompts)
    met = [*tried(rewards, train_prompts), *tried([*rewards, *eval_rewards], eval_prompts)]
    for reward, prompt in met:
        reward.check(SYNTHETIC, prompt.text, prompt.columns)


def load_text_policy(model: TextModel, device: torch.device) -> TextPolicy:
    """The model of a config, with its tokenizer."""
    predictor, tokenizer = load_predictor(
        model.path,
        DTYPES[model.dtype],
        device,
        trust_remote_code=model.trust_remote_code,
        mask_id=model.mask_id,
        shift=model.shift,
        attention=model.attention,
        block_size=model.block_size,
    )
    return TextPolicy(predictor, tokenizer, model.length, model.chat)


def policy_and_weights(settings: TextConfig, device: torch.device) -> tuple[TextPolicy, Weights]:
    """The model of a config and what of it is trained; a learned schedule is the module `schedule` of the weights.

    Raises:
        InputError: there is no such model, or it has no gradient checkpointing and is asked for it.
    """
    model, algorithm = settings.model, settings.algorithm
    policy = load_text_policy(model, device)
    network = policy.predictor.model
    network.requires_grad_(False)
    if model.gradient_checkpointing:
        checkpoint_gradients(network)
    modules = {"model": network}
    lora = model.lora and lora_config(model.lora.rank, model.lora.alpha, model.lora.targets, modules)
    schedule = algorithm.schedule.policy(model.length)
    kl = algorithm.objective.kl
    reference = "fixed" if kl.beta > 0 and kl.target == "reference" else None
    extra_modules = {} if schedule is None else {"schedule": schedule.to(device)}
    return policy, Weights(modules, lora, ema=settings.train.ema, reference=reference, extra_modules=extra_modules)


def trainer(
    settings: TextConfig,
    accelerator: Accelerator,
    *,
    train_prompts: Sequence[Prompt],
    eval_prompts: Sequence[Prompt],
    rewards: Sequence[Reward],
    eval_rewards: Sequence[Reward],
) -> TextTrainer:
    """The loop with its model.

    Raises:
        InputError: there is no such model, it predicts no masked tokens, or does not fit into memory.
    """
    memory.check(settings, accelerator.device)
    policy, weights = policy_and_weights(settings, accelerator.device)
    policy.prompts([p.text for p in (*train_prompts, *eval_prompts)])  # refuses what it cannot pad
    return TextTrainer(
        settings,
        policy,
        weights,
        rewards=rewards,
        train_prompts=train_prompts,
        eval_prompts=eval_prompts,
        eval_rewards=eval_rewards,
        accelerator=accelerator,
        schedule=weights.extra_modules.get("schedule"),
    )
