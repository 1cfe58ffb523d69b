"""What a run of a masked-diffusion language model needs before its first iteration: checks, then the model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator

from flowgrpo.mdlm.config import TextConfig, TextModel
from flowgrpo.mdlm.engine import request
from flowgrpo.mdlm.engine.adapters import Adapters
from flowgrpo.mdlm.engine.client import Client
from flowgrpo.mdlm.engine.rollout import EngineRollout
from flowgrpo.mdlm.methods.hints import check_solutions
from flowgrpo.mdlm.methods.schedules.learned_schedule import SchedulePolicy
from flowgrpo.mdlm.models import initial_lora, memory_estimate
from flowgrpo.mdlm.models.gradient_checkpointing import checkpoint_gradients
from flowgrpo.mdlm.models.load import check_weights, load_predictor
from flowgrpo.mdlm.models.lora_targets import write_adapter
from flowgrpo.mdlm.policy import TextPolicy
from flowgrpo.mdlm.trainer import text_loop
from flowgrpo.training.distributed.worker_roles import roles_of
from flowgrpo.training.loop import Loop
from flowgrpo.training.run.run_data import RunData
from flowgrpo.training.scoring.scorer import tried
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
    """Refuse a model that is not there, or whose files are not whole or lack weights; none are loaded.

    Raises:
        InputError: see `load.check_weights`.
    """
    check_weights(model.path, model.variant)


def check(settings: TextConfig, data: RunData) -> None:
    """Refuse what can be refused without the model.

    Raises:
        InputError: hints are wanted, and no training prompt has a solution, `model.lora.path` is no LoRA, or the engine of
            `run.engine` is not there, or cannot do what is asked of it.
        RewardError: a reward fails on a synthetic text.
    """
    sharding.check(settings)
    initial_lora.read(settings.model)
    if settings.run.engine is not None:
        model = settings.model
        decoder = settings.algorithm.decoder.build(model.length, 0, "algorithm.decoder", block_size=model.block_size)
        request.check(settings, decoder)
        Client(settings.run.engine).greet()
    check_solutions(settings.algorithm.hints, [prompt.columns for prompt in data.train_prompts])
    both = [*data.rewards, *data.eval_rewards]
    met = [*tried(data.rewards, data.train_prompts), *tried(both, data.eval_prompts)]
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
        quantise=model.quantise,
        variant=model.variant,
    )
    return TextPolicy(predictor, tokenizer, model.length, model.chat)


def policy_and_weights(
    settings: TextConfig, device: torch.device, *, learns: bool = True
) -> tuple[TextPolicy, Weights]:
    """The model of a config and what of it is trained; a learned schedule is the module `schedule` of the weights.

    One that processes are to share is asked what it can do in host memory, and goes to the device in parts.

    Args:
        learns: whether the weights go on to change, and have an average and a reference beside them.

    Raises:
        InputError: there is no such model, it has no gradient checkpointing and is asked for it, or `model.lora.path` is
            not a LoRA for it.
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
    begun, own = initial_lora.adapters(model, file, network), model.lora
    lora: LoraConfig | Mapping[str, Adapter] | None = None if own is None else begun
    if own is None and begun:
        begun["model"].merge(network)
    elif own is not None and not begun:
        assert own.rank is not None  # else adapters have begun
        assert own.alpha is not None
        assert own.targets is not None
        lora = lora_config(own.rank, own.alpha, own.targets, modules)
    schedule = algorithm.schedule.policy(model.length)
    extra_modules = {} if schedule is None else {"schedule": schedule.to(device)}
    weights = sharding.shard(
        modules,
        lambda: Weights(
            modules,
            lora,
            ema=settings.train.ema if learns else None,
            reference=algorithm.objective.kl.reference if learns else None,
            extra_modules=extra_modules,
        ),
        form=settings.run.sharding,
        device=device,
        full=lora is None,
    )
    weights.begun = begun
    return policy, weights


def trainer(settings: TextConfig, accelerator: Accelerator, data: RunData) -> Loop:
    """The loop with its model.

    Raises:
        InputError: there is no such model, it predicts no masked tokens, or does not fit into memory, or the engine of
            `run.engine` does not tell what a rollout needs.
    """
    memory_estimate.check(settings, accelerator.device)
    policy, weights = policy_and_weights(settings, accelerator.device)
    policy.prompts([p.text for p in (*data.train_prompts, *data.eval_prompts)])  # refuses what it cannot pad
    if weights.lockstep.active:
        with torch.no_grad(), weights.lockstep.meeting():
            policy.predictor.logits(*policy.prompts([data.train_prompts[0].text]))
    schedule = weights.extra_modules.get("schedule")
    assert schedule is None or isinstance(schedule, SchedulePolicy)
    evaluates = roles_of(settings.run, accelerator.num_processes).evaluates(accelerator.process_index)
    return text_loop(
        settings,
        policy,
        weights,
        **vars(data),
        accelerator=accelerator,
        schedule=schedule,
        engine=None if evaluates else _engine(settings, policy, weights, data.train_prompts[0].text),
    )


def _engine(settings: TextConfig, policy: TextPolicy, weights: Weights, prompt: str) -> EngineRollout | None:
    """What completes prompts in the policy's place, once it was seen to tell tokens and steps; None without `run.engine`.

    Raises:
        InputError: it does not, or does not answer.
    """
    section, run, predictor = settings.run.engine, settings.run, policy.predictor
    if section is None:
        return None
    folder = run.folder / "engine" if section.folder is None else Path(section.folder)

    def write(out: Path) -> None:
        write_adapter(settings.model, predictor.model, weights, out)

    adapters = Adapters(Client(section), weights, folder, run.name, write=write)
    decoder = settings.algorithm.decoder.build(policy.length, policy.eos_id, "algorithm.decoder", predictor=predictor)
    made = EngineRollout(section, predictor, decoder, adapters)
    made.try_out(policy.prompts([prompt]))
    return made
