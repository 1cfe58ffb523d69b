"""Preparation of a language model's run before its first iteration: checks, then loading of the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator

from flowgrpo.mdlm.config import TextConfig, TextModel
from flowgrpo.mdlm.methods.hints import check_solutions
from flowgrpo.mdlm.methods.schedules.learned_schedule import SchedulePolicy
from flowgrpo.mdlm.methods.solutions import check_every_solution
from flowgrpo.mdlm.models import initial_lora, memory_estimate
from flowgrpo.mdlm.models.gradient_checkpointing import checkpoint_gradients
from flowgrpo.mdlm.models.load import check_weights, load_positions, load_predictor, load_tokenizer
from flowgrpo.mdlm.planning.decoder_steps import training_decoder
from flowgrpo.mdlm.policy import TextPolicy, check_tokenizer, tokenised
from flowgrpo.mdlm.trainer import text_loop
from flowgrpo.training.distributed.worker_roles import assign_roles
from flowgrpo.training.loop import Loop
from flowgrpo.training.run.run_data import RunData
from flowgrpo.training.scoring.scorer import pair_with_prompts
from flowgrpo.training.weights import sharding
from flowgrpo.training.weights.lora_adapters import Adapter
from flowgrpo.training.weights.offload_activations import offload_activations
from flowgrpo.training.weights.quantisation import refuse_dynamic
from flowgrpo.training.weights.trained_weights import Weights, lora_config
from rewards.compute import DTYPES

if TYPE_CHECKING:
    from peft import LoraConfig

SYNTHETIC = "<answer>1 + 2</answer>"


def check_model(model: TextModel) -> None:
    """Raise InputError unless the model exists and its files hold all weights; none are loaded."""
    check_weights(model.path, model.variant)


def check(settings: TextConfig, data: RunData) -> None:
    """Check all that can be checked without the model.

    Raises:
        InputError: answers cannot branch where the tree says, hints are configured but no training prompt has a solution,
            `model.lora.path` is no LoRA, or a prompt does not fit.
        RewardError: a reward fails on a synthetic text.
    """
    sharding.check(settings)
    settings.algorithm.tree.branching(training_decoder(settings))
    initial_lora.read(settings.model)
    columns = [prompt.columns for prompt in data.train_prompts]
    check_solutions(settings.algorithm.hints, columns)
    check_every_solution(settings.algorithm.objective.solutions, columns)
    check_prompts(settings.model, [prompt.text for prompt in (*data.train_prompts, *data.eval_prompts)])
    both = [*data.rewards, *data.eval_rewards]
    met = [*pair_with_prompts(data.rewards, data.train_prompts), *pair_with_prompts(both, data.eval_prompts)]
    for reward, prompt in met:
        reward.check(SYNTHETIC, prompt.text, prompt.columns)


def check_prompts(model: TextModel, texts: Sequence[str]) -> None:
    """Raise InputError unless the model has a tokenizer that makes tokens of all prompts, with room for their answers."""
    tokenizer = load_tokenizer(model.path, trust_remote_code=model.trust_remote_code)
    check_tokenizer(tokenizer, model.chat)
    positions = load_positions(model.path, trust_remote_code=model.trust_remote_code)
    tokenised(tokenizer, texts, model.length, chat=model.chat, positions=positions)


def load_text_policy(model: TextModel, device: torch.device) -> TextPolicy:
    """Load the model of a config with its tokenizer."""
    predictor, tokenizer = load_predictor(
        model.path,
        DTYPES[model.dtype],
        device,
        trust_remote_code=model.trust_remote_code,
        mask_id=model.mask_id,
        shift=model.shift,
        attention=model.attention,
        block_size=model.block_size,
        quantise=model.quantise,
        variant=model.variant,
    )
    return TextPolicy(predictor, tokenizer, model.length, model.chat)


def policy_and_weights(
    settings: TextConfig, device: torch.device, *, learns: bool = True
) -> tuple[TextPolicy, Weights]:
    """Load the model of a config, and return it with its trained weights.

    A learned schedule is `weights.extra_modules["schedule"]`. Weights that will not be trained (`learns` is false) have
    no moving average and no reference. With `run.sharding` the model is loaded and probed in host memory; each process
    then moves its shard to the device.

    Raises:
        InputError: the model does not exist or does not support the gradient checkpointing that the config sets,
            or `model.lora.path` is not a LoRA for it.
    """
    model, algorithm = settings.model, settings.algorithm
    file = initial_lora.read(model)
    policy = load_text_policy(model, torch.device("cpu") if sharding.applies(settings.run.sharding) else device)
    network = policy.predictor.model
    network.requires_grad_(False)
    refuse_dynamic(network)
    if model.gradient_checkpointing:
        checkpoint_gradients(network)
    if model.offload_activations:
        offload_activations(network)
    modules = {"model": network}
    begun, section = initial_lora.adapters(model, file, network), model.lora
    lora: LoraConfig | Mapping[str, Adapter] | None = None if section is None else begun
    if section is None and begun:
        begun["model"].merge(network)
    elif section is not None and not begun:
        assert section.rank is not None  # null needs a path, whose adapters are then in `begun`
        assert section.alpha is not None
        assert section.targets is not None
        lora = lora_config(section.rank, section.alpha, section.targets, modules)
    schedule = algorithm.schedule.policy(model.length)
    extra_modules = {} if schedule is None else {"schedule": schedule.to(device)}
    weights = sharding.shard(
        modules,
        lambda: Weights(
            modules,
            lora,
            ema=settings.train.ema if learns else None,
            reference=algorithm.reference if learns else None,
            extra_modules=extra_modules,
        ),
        form=settings.run.sharding,
        device=device,
        full=lora is None,
    )
    weights.begun = begun
    return policy, weights


def trainer(settings: TextConfig, accelerator: Accelerator, data: RunData, engines: Any = None) -> Loop:
    """Load the model and return its training loop.

    `engines` is the module of `run.engine`; its `build` returns the engine that completes prompts in place of the
    policy. Raises InputError if the model does not exist, predicts no masked tokens, or does not fit into memory.
    """
    memory_estimate.check(settings, accelerator.device)
    policy, weights = policy_and_weights(settings, accelerator.device)
    if weights.lockstep.active:
        with torch.no_grad(), weights.lockstep.meeting():
            policy.predictor.logits(*policy.prompts([data.train_prompts[0].text]))
    schedule = weights.extra_modules.get("schedule")
    assert schedule is None or isinstance(schedule, SchedulePolicy)
    evaluates = assign_roles(settings.run, accelerator.num_processes).evaluates(accelerator.process_index)
    engine = None
    if engines is not None and not evaluates:
        engine = engines.build(settings, policy, weights, data.train_prompts[0].text)
    return text_loop(
        settings,
        policy,
        weights,
        **vars(data),
        accelerator=accelerator,
        schedule=schedule,
        engine=engine,
    )
