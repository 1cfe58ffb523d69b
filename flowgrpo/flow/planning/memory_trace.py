"""What a run allocates on its device and computes, found by its own pipeline with networks of real size without numbers.

Only configs are read. The pipeline, its schedule, its latents and our policy run as ever, on small real tensors; inside the
networks tensors have shapes alone (see `training.planning.meta_networks`). Guided branches, checkpointing, adapters and a
quantised base are all counted, for they run.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from peft import LoraConfig

from flowgrpo.data.prompts import Row
from flowgrpo.flow.config import Config, Model
from flowgrpo.flow.model import initial_lora
from flowgrpo.flow.pipeline import guidance
from flowgrpo.flow.pipeline.loading import load, meta_pipeline
from flowgrpo.flow.pipeline.networks import traits
from flowgrpo.flow.pipeline.networks.switches import ENTRANCES, checkpoint_gradients, decoders, tile
from flowgrpo.flow.pipeline.policy import DiffusersPolicy
from flowgrpo.flow.rollouts.prompt_encoding import changed, eval_call
from flowgrpo.flow.updates.rollout_graphs import Kept
from flowgrpo.training.model_files.hub_files import Shape
from flowgrpo.training.planning.allocation_counter import Peaks
from flowgrpo.training.planning.meta_networks import MetaNetworks, size
from flowgrpo.training.weights import quantisation
from flowgrpo.training.weights.lora_adapters import Adapter
from flowgrpo.training.weights.trained_weights import Weights, lora_config
from rewards.compute import DTYPES


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """What it takes to sample a row under some arguments of the pipeline's call, in bytes and floating-point operations.

    Attributes:
        step: without gradients.
        operations: of a step, all branches of its guidance.
        launches: functions of PyTorch that the networks call in a step, whatever the number of rows.
        calls: of the networks in a step, which a batch of both branches needs one of.
        decode: a sample; nothing where the config has it in tiles.
        decode_tiled: a sample in tiles; None where the decoder has no tiling.
        sample: the decoded sample itself, in float32.
        decode_operations: of decoding it, in tiles where the config has it so.
    """

    step: Peaks
    operations: int
    launches: int
    calls: int
    decode: Peaks
    decode_tiled: Peaks | None
    sample: int
    decode_operations: int


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Sizes of a pipeline, and what its calls allocate beside them, in bytes.

    Attributes:
        components: of each component, its weights as they are loaded.
        shapes: of the tensors of the networks that are trained or adapted, by component and name.
        width: bytes of a weight that is not quantised.
        trained: how many numbers are trained.
        state: of one latent state in float32.
        encode: one prompt.
        rollout: sampling as in training.
        evaluate: sampling as in an evaluation; None where it takes as much.
        update: a step with gradients, and its backward pass; nothing where the config has checkpointing.
        update_checkpointed: the same with `model.gradient_checkpointing`; None where a network does not support it.
        graph: what a step keeps for its backward pass; nothing where the config has checkpointing.
        graph_checkpointed: the same with it; nothing where a network does not support it.
        dequantises: whether weights that layers of this package make anew are among these.
    """

    components: dict[str, int]
    shapes: dict[str, dict[str, Shape]]
    width: int
    trained: int
    state: int
    encode: int
    rollout: Sampling
    evaluate: Sampling | None
    update: Peaks
    update_checkpointed: Peaks | None
    graph: Kept
    graph_checkpointed: Kept
    dequantises: bool


def trial(config: Config, folder: str, row: Row) -> Trial:
    """Measure a run's calls.

    Args:
        folder: of the pipeline's configs.
        row: the prompt that is tried, best the longest.

    Raises:
        InputError: the config asks for what the pipeline has not.
    """
    model, hollow = config.model, MetaNetworks()
    pipe = meta_pipeline.pipeline(folder, DTYPES[model.dtype])
    networks = {name: m for name, m in pipe.components.items() if isinstance(m, torch.nn.Module)}
    trained = traits.networks(pipe)
    components = {name: size(network) for name, network in networks.items()}
    shapes = {
        name: {path: tuple(p.shape) for path, p in network.named_parameters()} for name, network in trained.items()
    }
    full_in_half = model.lora is None and model.dtype != "float32"
    policy = DiffusersPolicy(
        pipe,
        {**load.embedded.call_of(model.path), **model.call},
        autocast=DTYPES[model.dtype] if full_in_half else None,
    )
    if model.gradient_checkpointing:
        checkpoint_gradients(policy.modules.values())
    if model.vae_tiling:
        tile(pipe)
    numbers = _trainable(model, policy)
    for name, network in networks.items():
        decodes = name in decoders(pipe)  # of videos, with what it leaves for the next frames
        reads_once = name.startswith(traits.ENCODERS)
        hollow.empty(network, ENTRANCES if decodes else ("forward",), run_all=decodes, reads_once=reads_once)
    evaluation = eval_call(config, policy)
    with policy.call_overrides(**guidance.training_call(model.guidance, policy)):
        other = changed(evaluation, policy)
        with torch.no_grad(), hollow.phase() as live:
            policy.prepare([row])
            if other:
                with policy.call_overrides(**evaluation):
                    policy.prepare([row])
            encode = live.peak
        sampling, state = _sampling(policy, hollow, row, tiled=model.vae_tiling)
        evaluate = None
        if other:
            with policy.call_overrides(**evaluation):
                evaluate, _ = _sampling(policy, hollow, row, tiled=model.vae_tiling, before=(sampling, state))
        whole, small = _update(policy, hollow, row, state, checkpointed=model.gradient_checkpointing)
    return Trial(
        components=components,
        shapes=shapes,
        width=torch.finfo(DTYPES[model.dtype]).bits // 8,
        trained=numbers,
        state=4 * sum(x.numel() for x in state),
        encode=encode,
        rollout=sampling,
        evaluate=evaluate,
        update=whole[0],
        update_checkpointed=small[0],
        graph=whole[1],
        graph_checkpointed=small[1],
        dequantises=model.quantise is not None,
    )


def _trainable(model: Model, policy: DiffusersPolicy) -> int:
    """Quantise, adapt and unfreeze the networks of a policy as a run does; return how many numbers are trained."""
    if model.quantise is not None:
        for network in policy.modules.values():
            quantisation.quantise(network, model.quantise)
    own = model.lora
    lora: LoraConfig | Mapping[str, Adapter] | None = None if own is None else initial_lora.adapters(model)
    if own is not None and not lora:
        assert own.rank is not None  # else adapters have begun
        assert own.alpha is not None
        assert own.targets is not None
        lora = lora_config(own.rank, own.alpha, own.targets, policy.modules)
        lora.init_lora_weights = False  # there are no numbers to draw
    with torch.device("meta"):
        weights = Weights(policy.modules, lora)
    return sum(p.numel() for p in weights.parameters)


@torch.no_grad()
def _sampling(
    policy: DiffusersPolicy,
    hollow: MetaNetworks,
    row: Row,
    *,
    tiled: bool,
    before: tuple[Sampling, tuple[torch.Tensor, ...]] | None = None,
) -> tuple[Sampling, tuple[torch.Tensor, ...]]:
    """What it takes to sample a row, and its first state; decoded in tiles alone where these are `tiled`.

    Args:
        before: the same under other arguments; states of the same sizes are decoded alike.
    """
    calls: list[torch.nn.Module] = []
    hooks = [network.register_forward_pre_hook(lambda own, _: calls.append(own)) for network in policy.modules.values()]
    with hollow.phase() as live:
        state = policy.start([row])
        calls.clear()
        operations, launches = live.operations, live.launches
        policy.walk.velocity(state, policy.sigmas[0], [row])
        step, operations, launches = live.peaks, live.operations - operations, live.launches - launches
    for hook in hooks:
        hook.remove()
    found: dict[str, Any] = {"step": step, "operations": operations, "launches": launches, "calls": len(calls)}
    if before is not None and [x.shape for x in before[1]] == [x.shape for x in state]:
        return replace(before[0], **found), state
    in_tiles = _decoded_in_tiles(policy, hollow, row, state)
    as_run = in_tiles if tiled and in_tiles is not None else _decoded(policy, hollow, row, state)
    sampling = Sampling(
        **found,
        decode=Peaks() if as_run is in_tiles else as_run.peaks,
        decode_tiled=None if in_tiles is None else in_tiles.peaks,
        sample=(in_tiles or as_run).sample,
        decode_operations=as_run.operations,
    )
    return sampling, state


@dataclass(frozen=True, kw_only=True)
class _Decoded:
    """What decoding a row allocates, its operations, and bytes of the sample."""

    peaks: Peaks
    operations: int
    sample: int


def _decoded(policy: DiffusersPolicy, hollow: MetaNetworks, row: Row, state: tuple[torch.Tensor, ...]) -> _Decoded:
    with hollow.phase() as live:
        sample = policy.walk.decode(state, [row], by_landing=False)
        return _Decoded(peaks=live.peaks, operations=live.operations, sample=4 * sample.numel())


def _decoded_in_tiles(
    policy: DiffusersPolicy, hollow: MetaNetworks, row: Row, state: tuple[torch.Tensor, ...]
) -> _Decoded | None:
    known: list[Any] = [*decoders(policy.pipe).values()]
    tiling = [d for d in known if hasattr(d, "enable_tiling") and hasattr(d, "use_tiling")]
    if not tiling:
        return None
    for decoder in tiling:
        decoder.enable_tiling()
    log = logging.getLogger("torch._subclasses.fake_tensor")
    log.disabled = True  # what it raises is told by None
    try:
        return _decoded(policy, hollow, row, state)
    except RuntimeError:  # some leave a tile that is smaller than their padding, with numbers too
        return None
    finally:
        log.disabled = False
        for decoder in tiling:
            decoder.use_tiling = False


def _update(
    policy: DiffusersPolicy, hollow: MetaNetworks, row: Row, state: tuple[torch.Tensor, ...], *, checkpointed: bool
) -> tuple[tuple[Peaks, Kept], tuple[Peaks | None, Kept]]:
    """What a step and its backward pass allocate, and what it keeps between, without checkpointing and with it."""
    networks = policy.modules.values()
    hollow.with_gradients(networks)
    nothing = Kept(once=0, each=0)
    whole = (Peaks(), nothing) if checkpointed else _learnt(policy, hollow, row, state)
    if not all(getattr(network, "_supports_gradient_checkpointing", False) for network in networks):
        return whole, (None, nothing)
    checkpoint_gradients(networks)
    return whole, _learnt(policy, hollow, row, state)


def _learnt(
    policy: DiffusersPolicy, hollow: MetaNetworks, row: Row, state: tuple[torch.Tensor, ...]
) -> tuple[Peaks, Kept]:
    with hollow.phase() as live:
        velocity = policy.walk.velocity(state, policy.sigmas[0], [row])
        once, each = live.parts
        cast("torch.Tensor", sum(v.float().square().mean() for v in velocity)).backward()
        return live.peaks, Kept(once=once, each=each)
