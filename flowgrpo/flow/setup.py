"""Preparation of a flow model's run before its first iteration: cheap checks, then loading of the model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from accelerate import Accelerator
from diffusers.utils.constants import DIFFUSERS_ATTN_BACKEND
from peft import LoraConfig
from torch import distributed

from flowgrpo.data import conditions
from flowgrpo.data.prompts import Prompt, Row
from flowgrpo.errors import InputError
from flowgrpo.flow.config import Config, Model
from flowgrpo.flow.model import context_parallel, initial_lora, memory_estimate, teacher
from flowgrpo.flow.offline import stored_groups
from flowgrpo.flow.pipeline import guidance
from flowgrpo.flow.pipeline.call_arguments import check_call
from flowgrpo.flow.pipeline.inputs.modality import expected_shape, frame_rate, has_soundtrack, sampling_rate
from flowgrpo.flow.pipeline.loading.load import check_process, check_weights, load_policy, pipeline_class
from flowgrpo.flow.pipeline.networks.attention import set_attention, try_attention
from flowgrpo.flow.pipeline.networks.attention_backends import refuse_lossy_attention
from flowgrpo.flow.pipeline.networks.compiled_blocks import CompiledBlocks
from flowgrpo.flow.pipeline.networks.switches import checkpoint_gradients, decoders, offload, tile
from flowgrpo.flow.pipeline.policy import DiffusersPolicy
from flowgrpo.flow.planning.iteration_forecast import predict_cost
from flowgrpo.flow.planning.plan import call_and_branches, check_columns
from flowgrpo.flow.planning.unseen import unseen
from flowgrpo.flow.rollouts import cheap_finishes, early_stop, hinted_rollout, noise_calibration
from flowgrpo.flow.rollouts.prompt_encoding import build_rows, encode_run, longest_and_shortest
from flowgrpo.flow.trainer import flow_loop
from flowgrpo.schema.sections import Ema
from flowgrpo.training.checkpoints import checkpoint
from flowgrpo.training.distributed.data_shard import data_shards
from flowgrpo.training.distributed.worker_roles import assign_roles
from flowgrpo.training.loop import Loop
from flowgrpo.training.reports.samples import SAMPLING_RATE
from flowgrpo.training.run.run_data import RunData
from flowgrpo.training.scoring.scorer import pair_with_prompts
from flowgrpo.training.weights import low_precision_copies, sharding
from flowgrpo.training.weights.lora_adapters import Adapter
from flowgrpo.training.weights.offload_activations import offload_activations
from flowgrpo.training.weights.old_policies import Bank, Decay
from flowgrpo.training.weights.optimizers import check_compiler
from flowgrpo.training.weights.quantisation import refuse_dynamic
from flowgrpo.training.weights.trained_weights import Weights, lora_config
from rewards import Reward
from rewards.audio import Films
from rewards.compute import DTYPES

LOGGER = logging.getLogger(__name__)


def check_model(model: Model) -> None:
    """Raise InputError if the model is missing, incomplete or no flow; no weights are loaded. See `load.check_weights`."""
    check_weights(model.path, model.variant)
    check_process(model.path)


def check(settings: Config, data: RunData) -> None:
    """Check all that can be checked without the model.

    Raises:
        InputError: the axes of `algorithm` do not fit each other, the folder's calibration cannot be read, or
            `model.lora.path` is not a LoRA for the model.
        RewardError: a reward fails on synthetic samples.
    """
    if settings.algorithm.kernel.calibrate is not None:
        folder = settings.run.folder
        noise_calibration.read(folder, begun=checkpoint.step_to_resume(folder / "checkpoints") is not None)
    sharding.check(settings)
    if settings.run.trees is not None and (settings.run.engine is not None or settings.stored_groups is not None):
        LOGGER.warning("run.trees: the run keeps no trees, because run.engine or data.groups makes its samples")
    context_parallel.check(settings)
    initial_lora.check_switched(initial_lora.adapters(settings.model), settings)
    teacher.check(settings)
    check_columns(settings, data.train_prompts)
    check_columns(settings, data.eval_prompts, settings.eval.call)
    hinted_rollout.check_pictures(settings, [prompt.columns for prompt in data.train_prompts])
    call = call_and_branches(settings, columns=data.train_prompts[0].columns)[0]
    stored_groups.check_model(settings, stored_groups.load_source(settings), call)
    if settings.train.draft is not None:
        check_call(pipeline_class(settings.model.path), settings.train.draft.call, "train.draft.call")
    steps = call["num_inference_steps"]
    if steps is not None:  # otherwise the pipeline decides; `trainer` checks then
        predict_cost(settings, steps)  # raises InputError for axes that do not fit each other
    for sentence in unseen(settings):
        LOGGER.warning("rewards: %s", sentence)
    early_stop.check_rewards(settings, data.rewards)
    check_rewards(data.rewards, data.train_prompts, settings.model)
    check_rewards([*data.rewards, *data.eval_rewards], data.eval_prompts, settings.model)


def trainer(settings: Config, accelerator: Accelerator, data: RunData, engines: Any = None) -> Loop:
    """Load the model, probe on a few rows whether it supports the config, and return the training loop.

    `engines` is the module of `run.engine`, whose `build` returns the engine that samples in place of the policy; None
    without an engine. Raise InputError if the model does not support the config, or does not fit into memory.
    """
    context_parallel.check_device(settings)
    low_precision_copies.check_device(settings, accelerator.device)
    begun = initial_lora.adapters(settings.model)
    memory_estimate.check(settings, accelerator.device, begun)
    done = checkpoint.step_to_resume(settings.run.folder / "checkpoints") if settings.run.resume else None
    roles = assign_roles(settings.run, accelerator.num_processes)
    shards = data_shards(accelerator, settings.run.context_parallel, roles)

    def encode(policy: DiffusersPolicy) -> None:
        for part, key in ((data.train_prompts, "prompts.train"), (data.eval_prompts, "prompts.eval")):
            conditions.check((p.columns for p in part), policy.takes, key)
        encode_run(
            policy,
            settings,
            data.train_prompts,
            data.eval_prompts if roles.samples_held_out(accelerator.process_index) else (),
            device=accelerator.device,
            done=done or 0,
            shards=shards,
            rolls_out=not roles.evaluates(accelerator.process_index),
        )

    policy, weights = policy_and_weights(settings, accelerator.device, encode, begun)
    train_prompts, eval_prompts = (with_sampling_rate(part, policy) for part in (data.train_prompts, data.eval_prompts))
    train_ends, eval_ends = (build_rows(longest_and_shortest(part)) for part in (train_prompts, eval_prompts))
    steps = call_and_branches(settings, columns=train_prompts[0].columns)[0]["num_inference_steps"]
    with policy.call_overrides(**guidance.training_call(settings.model.guidance, policy)):
        policy.check(train_ends)
        cheap_finishes.check_policy(settings, policy)
        if settings.model.guidance != "pipeline":
            with policy.call_overrides(**guidance.update_call(settings.model.guidance, policy)):
                guidance.check_unguided(policy, train_ends)
        if settings.algorithm.likelihood.name == "elbo":
            guidance.mixes_levels(settings.model.guidance, policy, train_ends)  # here, where all processes probe
        if len(policy.sigmas) - 1 != steps:  # some pipelines take another number of steps than num_inference_steps
            predict_cost(settings, len(policy.sigmas) - 1)
        if settings.train.draft is not None:
            with policy.call_overrides(**settings.train.draft.call):
                policy.check(train_ends, "train.draft.call")
        if weights.lockstep.active:
            _refuse_pins(policy)
            with weights.lockstep.meeting():
                _meet(policy, train_ends[:1])
        evaluates = roles.evaluates(accelerator.process_index)
        engine = None if evaluates or engines is None else engines.build(settings, policy, weights, train_ends)
    if settings.eval.call or settings.model.guidance == "none" or (weights.lockstep.active and eval_ends):
        with policy.call_overrides(**settings.eval.call):
            policy.check(eval_ends, "eval.call")
            if weights.lockstep.active:
                _refuse_pins(policy)
    data = replace(data, train_prompts=train_prompts, eval_prompts=eval_prompts)
    source = stored_groups.load_source(settings)
    return flow_loop(
        settings,
        policy,
        weights,
        **vars(data),
        accelerator=accelerator,
        shards=shards,
        engine=engine,
        source=source,
        frame_rate=frame_rate(policy.pipe, policy.call | settings.eval.call),
    )


def _refuse_pins(policy: DiffusersPolicy) -> None:
    """Raise InputError if the pipeline pins a part of the state: it skips network calls, which all shards must make."""
    if policy.walk.pins:
        raise InputError(
            f"run.sharding: {type(policy.pipe).__name__} fixes a part of its samples, so its network is not always "
            "called as a whole; set run.sharding=none"
        )


@torch.no_grad()
def _meet(policy: DiffusersPolicy, rows: Sequence[Row]) -> None:
    """Call each network of a policy once, with the same arguments on every process; see `Lockstep`."""
    state = policy.start(rows)
    for sigma in (policy.sigmas[0], policy.sigmas[-2]):  # a model with two experts has one for each of these
        policy.velocity(state, sigma, rows)


def policy_and_weights(
    config: Config,
    device: torch.device,
    encode: Callable[[DiffusersPolicy], object] | None = None,
    begun: Mapping[str, Adapter] | None = None,
    *,
    learns: bool = True,
) -> tuple[DiffusersPolicy, Weights]:
    """Return the policy of a config, with its switches set, and its trainable weights.

    Args:
        encode: encodes the coming rows, before the networks are loaded; see `load_policy`.
        begun: the result of `initial_lora.adapters` for the model; None computes it.
        learns: whether the weights will be trained; only then they have an average, a reference and other policies.
    """
    model = config.model
    check_switches(model, device)
    begun = initial_lora.adapters(model) if begun is None else begun
    full_in_half = model.lora is None and model.dtype != "float32"  # weights in float32, computation in half precision
    policy = load_policy(
        model.path,
        model.dtype,
        model.call,
        device,
        quantise=model.quantise,
        variant=model.variant,
        encode=encode,
        autocast=DTYPES[model.dtype] if full_in_half else None,
        text_encoders=model.text_encoders,
        on_host=sharding.applies(config.run.sharding),
    )
    for network in policy.modules.values():
        refuse_dynamic(network)
    set_switches(model, policy, torch.empty(0, device=device).device)  # with its index, as weights have it
    for name, adapter in begun.items() if model.lora is None else ():
        adapter.merge(policy.modules[name])
    algorithm = config.algorithm
    kept: dict[str, Any] = {"ema": None}
    if learns:
        kept = {"ema": config.train.ema} | {name: getattr(algorithm, name) for name in ("reference", "old", "bank")}

    taught = teacher.check(config) if learns else {}

    def make() -> Weights:
        made = trainable(model, policy, **kept, refresh=algorithm.objective.kl.refresh, begun=begun)
        if taught:
            teacher.put(made, taught)
        elif learns and model.teacher is not None:
            teacher.put_pipeline(made, model.teacher, model.variant)
        if distributed.is_initialized() and config.run.context_parallel > 1:  # doctor and export run in one process
            context_parallel.share_calls(policy.modules, config.run.context_parallel, device)
        return made

    weights = sharding.shard(
        policy.modules,
        make,
        form=config.run.sharding,
        device=device,
        full=model.lora is None,
        gather=DTYPES[model.dtype] if full_in_half else None,
    )
    return policy, weights


def trainable(
    model: Model,
    policy: DiffusersPolicy,
    *,
    ema: Ema | None,
    reference: str | None = None,
    refresh: int = 1,
    old: Decay | None = None,
    bank: Bank | None = None,
    begun: Mapping[str, Adapter] = MappingProxyType({}),
) -> Weights:
    """Return the trained weights of a config, unfrozen: adapters on the policy's modules, or all weights; see `Weights`.

    `begun` is the result of `initial_lora.adapters`.
    """
    section = model.lora
    lora: LoraConfig | Mapping[str, Adapter] | None = None if section is None else begun
    if section is not None and not begun:
        assert section.rank is not None  # null needs a path, whose adapters are then in `begun`
        assert section.alpha is not None
        assert section.targets is not None
        lora = lora_config(section.rank, section.alpha, section.targets, policy.modules)
    weights = Weights(policy.modules, lora, ema=ema, reference=reference, refresh=refresh, old=old, bank=bank)
    weights.begun = begun
    return weights


def with_sampling_rate(prompts: Sequence[Prompt], policy: DiffusersPolicy) -> list[Prompt]:
    """Return the prompts with a column `sampling_rate`, which audio rewards read; unchanged if the model makes no sound."""
    rate = sampling_rate(policy.pipe)
    return [replace(p, columns={**p.columns, "sampling_rate": rate}) for p in prompts] if rate else list(prompts)


def check_rewards(rewards: Sequence[Reward], prompts: Sequence[Prompt], model: Model) -> None:
    """Call every reward on two synthetic samples of the first prompt that it applies to.

    Raise RewardError if a reward fails, or returns wrong values.
    """
    pipeline = pipeline_class(model.path)
    shape = expected_shape(pipeline, model.call)
    seen, heard = _synthetic(shape), has_soundtrack(pipeline, model.call)
    sample = Films(seen, _synthetic((2, SAMPLING_RATE))) if heard else seen
    rate = {"sampling_rate": SAMPLING_RATE} if heard or len(shape) == 2 else {}
    for reward, prompt in pair_with_prompts(rewards, prompts):
        reward.check(sample, prompt.text, {**rate, **prompt.columns})


def _synthetic(shape: Sequence[int]) -> torch.Tensor:
    """Return a synthetic sample: an image of colour ramps, a video of shifted ramps (at most 8 frames), or a tone."""
    if len(shape) == 2:
        channels, length = shape
        return 0.5 * torch.linspace(0, 880 * torch.pi, length).sin().expand(channels, length)
    *frames, _, height, width = shape
    ramp = torch.linspace(0, 1, width).expand(height, width)
    picture = torch.stack([ramp, ramp.flip(1), torch.full((height, width), 0.5)])
    return torch.stack([picture.roll(i, -1) for i in range(min(frames[0], 8))]) if frames else picture


def check_switches(model: Model, device: torch.device) -> None:
    """Check, before the model is loaded, that this machine supports the switches.

    Raise InputError if the attention backend or a compiler is missing here, or the backend quantises.
    """
    if model.attention is None:
        refuse_lossy_attention(DIFFUSERS_ATTN_BACKEND, "DIFFUSERS_ATTN_BACKEND")
    check_installed(model, device)


def check_installed(model: Model, device: torch.device, *, learns: bool = True) -> None:
    """Check that the attention backend and the compiler of the config work here, with gradients if the model `learns`.

    Raise InputError if one of them is missing, or the GPU of CUDA graphs.
    """
    if model.attention is not None:
        try_attention(model.attention, model.dtype, device, learns=learns)
    if model.compile is True:
        check_compiler("model.compile", device, "remove model.compile")
    if model.cuda_graphs and device.type != "cuda":
        raise InputError(f"model.cuda_graphs: it needs a CUDA GPU, and this run is on {device.type}; set it to false")


def set_switches(model: Model, policy: DiffusersPolicy, device: torch.device) -> None:
    """Set the switches of a config on a policy's pipeline, before its weights are unfrozen.

    Raise InputError if a network of the pipeline does not support a switch.
    """
    modules = policy.modules.values()
    if model.gradient_checkpointing:
        checkpoint_gradients(modules)
    if model.compile:  # before `offload_activations`, which must not see the tensors that compiled blocks drop
        policy.compiled = CompiledBlocks(modules)
        policy.compiled.switch(model.compile is True)  # auto decides once the calls of the run are known
    if model.offload_activations:
        for module in modules:
            offload_activations(module)
    if model.attention is not None:
        set_attention(modules, model.attention)
    if model.vae_tiling:
        tile(policy.pipe)
    if model.vae == "offload":
        for module in decoders(policy.pipe).values():
            offload(module, device)
