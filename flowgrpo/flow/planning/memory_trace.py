"""Memory and operations of a run's calls, measured with its own pipeline on networks of real size without values.

Only configs are read. The pipeline, its schedule, its latents and our policy run as usual on small real tensors. Inside
the networks, tensors have shapes but no values (see `training.planning.meta_networks`). Guidance branches,
checkpointing, adapters and a quantised base run too, so they are counted.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from flowgrpo.data.prompts import Row
from flowgrpo.flow.config import Config
from flowgrpo.flow.model import initial_lora
from flowgrpo.flow.pipeline import guidance
from flowgrpo.flow.pipeline.inputs.prompt_embeddings import EmbeddingShape
from flowgrpo.flow.pipeline.loading import load, meta_pipeline
from flowgrpo.flow.pipeline.networks import traits
from flowgrpo.flow.pipeline.networks.switches import ENTRANCES, checkpoint_gradients, decoders, tile
from flowgrpo.flow.pipeline.policy import DiffusersPolicy
from flowgrpo.flow.rollouts.prompt_encoding import changed_arguments, eval_call, further_calls
from flowgrpo.flow.updates.rollout_graphs import Kept
from flowgrpo.training.planning.allocation_counter import Peaks
from flowgrpo.training.planning.memory_phases import TrialSizes
from flowgrpo.training.planning.meta_networks import MetaNetworks, add_adapters, size
from flowgrpo.training.weights import quantisation
from rewards.audio import tensors
from rewards.compute import DTYPES


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Bytes and floating-point operations of sampling one row with given call arguments."""

    step: Peaks  # bytes of a step without gradients
    operations: int  # of a step with all guidance branches
    launches: int  # number of PyTorch functions in a step
    calls: int  # number of network calls in a step; both branches may share one
    widest: int  # numbers in the largest output of a linear layer
    decode: Peaks  # bytes of decoding; empty if the config decodes in tiles
    decode_tiled: Peaks | None  # bytes of decoding in tiles; None if the decoder cannot
    sample: int  # bytes of the decoded sample in float32
    decode_operations: int  # of decoding, in tiles if the config decodes in tiles


@dataclass(frozen=True, kw_only=True)
class Trial(TrialSizes):
    """Sizes of a pipeline and of its calls, in bytes."""

    state: int  # one latent state in float32
    encode: int  # peak of encoding one prompt
    embeddings: int  # of a training prompt, in host memory
    held_out_embeddings: int  # of a held-out prompt, in host memory
    rollout: Sampling
    evaluate: Sampling | None  # None if evaluation takes as much as a rollout
    graph: Kept  # autograd graph of a step; empty if the config has checkpointing
    graph_checkpointed: Kept  # the same with checkpointing; empty if a network does not support it


def trial(config: Config, folder: str, row: Row) -> Trial:
    """Measure a run's calls, from the configs in `folder` and the longest prompt (`row`); raise InputError as runs do."""
    model, meta = config.model, MetaNetworks()
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
        {**load.embedded.default_call(model.path), **model.call},
        autocast=DTYPES[model.dtype] if full_in_half else None,
    )
    if model.gradient_checkpointing:
        checkpoint_gradients(policy.modules.values())
    if model.vae_tiling:
        tile(pipe)
    if model.quantise is not None:
        for network in policy.modules.values():
            quantisation.quantise(network, model.quantise)
    begun = None if model.lora is None else initial_lora.adapters(model)
    numbers = add_adapters(policy.modules, model.lora, begun)
    for name, network in networks.items():
        decodes = name in decoders(pipe)  # run in full: a video decoder keeps features for the next frames
        reads_once = name.startswith(traits.ENCODERS)
        meta.empty(network, ENTRANCES if decodes else ("forward",), run_all=decodes, reads_once=reads_once)
    evaluation = eval_call(config, policy)
    with policy.call_overrides(**guidance.training_call(model.guidance, policy)):
        other = changed_arguments(evaluation, policy)
        with torch.no_grad(), meta.phase() as live:
            embeddings, held_out_embeddings = _measure_embeddings(config, policy, row, evaluation)
            encode = live.peak
        sampling, state = _measure_sampling(policy, meta, row, tiled=model.vae_tiling)
        evaluate = None
        if other:
            with policy.call_overrides(**evaluation):
                evaluate, _ = _measure_sampling(policy, meta, row, tiled=model.vae_tiling, before=(sampling, state))
        update, graph = _measure_updates(policy, meta, row, state, checkpointed=model.gradient_checkpointing)
    return Trial(
        components=components,
        shapes=shapes,
        width=torch.finfo(DTYPES[model.dtype]).bits // 8,
        trained=numbers,
        state=4 * sum(x.numel() for x in state),
        encode=encode,
        embeddings=embeddings,
        held_out_embeddings=held_out_embeddings,
        rollout=sampling,
        evaluate=evaluate,
        update=update[0] or Peaks(),
        update_checkpointed=update[1],
        graph=graph[0],
        graph_checkpointed=graph[1],
        dequantises=model.quantise is not None,
    )


def _measure_embeddings(
    config: Config, policy: DiffusersPolicy, row: Row, evaluation: dict[str, Any]
) -> tuple[int, int]:
    """Encode a prompt under each call of a run; return the bytes that a training and a held-out prompt keep."""

    def encode(call: dict[str, Any], key: str) -> tuple[EmbeddingShape, ...]:
        with policy.call_overrides(**call):
            policy.prepare([row], key)
            return policy.walk.encode(row)

    kept: list[tuple[EmbeddingShape, ...]] = []
    for call, key in [({}, "model.call"), *further_calls(config, policy)]:
        if (shapes := encode(call, key)) not in kept:  # else it is the same embedding
            kept.append(shapes)
    return sum(s.nbytes for shapes in kept for s in shapes), sum(s.nbytes for s in encode(evaluation, "eval.call"))


@torch.no_grad()
def _measure_sampling(
    policy: DiffusersPolicy,
    meta: MetaNetworks,
    row: Row,
    *,
    tiled: bool,
    before: tuple[Sampling, tuple[torch.Tensor, ...]] | None = None,
) -> tuple[Sampling, tuple[torch.Tensor, ...]]:
    """Return the sizes of sampling a row, and the row's initial state.

    `before` is an earlier result. If its state has the same shapes, its sizes of decoding are reused.
    """
    calls: list[torch.nn.Module] = []
    outputs: list[int] = []
    hooks = [net.register_forward_pre_hook(lambda module, _: calls.append(module)) for net in policy.modules.values()]
    linear = (m for net in policy.modules.values() for m in net.modules() if isinstance(m, torch.nn.Linear))
    hooks += [layer.register_forward_hook(lambda _, given, out: outputs.append(out.numel())) for layer in linear]
    with meta.phase() as live:
        state = policy.start([row])
        calls.clear()
        operations, launches = live.operations, live.launches
        policy.walk.velocity(state, policy.sigmas[0], [row])
        step: dict[str, Any] = {
            "step": live.peaks,
            "operations": live.operations - operations,
            "launches": live.launches - launches,
            "calls": len(calls),
            "widest": max(outputs, default=0),
        }
    for hook in hooks:
        hook.remove()
    if before is not None and [x.shape for x in before[1]] == [x.shape for x in state]:
        return replace(before[0], **step), state
    in_tiles = _measure_tiled_decoding(policy, meta, row, state)
    whole = None if tiled and in_tiles is not None else _measure_decoding(policy, meta, row, state)
    chosen = whole or in_tiles
    assert chosen is not None
    sampling = Sampling(
        **step,
        decode=Peaks() if whole is None else whole.peaks,
        decode_tiled=None if in_tiles is None else in_tiles.peaks,
        sample=(in_tiles or chosen).sample,
        decode_operations=chosen.operations,
    )
    return sampling, state


@dataclass(frozen=True, kw_only=True)
class _Decoding:
    """Bytes and operations of decoding a row, and bytes of the sample."""

    peaks: Peaks
    operations: int
    sample: int


def _measure_decoding(
    policy: DiffusersPolicy, meta: MetaNetworks, row: Row, state: tuple[torch.Tensor, ...]
) -> _Decoding:
    with meta.phase() as live:
        sample = policy.walk.decode(state, [row], by_landing=False)
        return _Decoding(
            peaks=live.peaks, operations=live.operations, sample=4 * sum(part.numel() for part in tensors(sample))
        )


def _measure_tiled_decoding(
    policy: DiffusersPolicy, meta: MetaNetworks, row: Row, state: tuple[torch.Tensor, ...]
) -> _Decoding | None:
    known: list[Any] = [*decoders(policy.pipe).values()]
    tiling = [d for d in known if hasattr(d, "enable_tiling") and hasattr(d, "use_tiling")]
    if not tiling:
        return None
    for decoder in tiling:
        decoder.enable_tiling()
    log = logging.getLogger("torch._subclasses.fake_tensor")
    log.disabled = True  # an error here only means that tiling is not possible
    try:
        return _measure_decoding(policy, meta, row, state)
    except RuntimeError:  # some decoders make a tile that is smaller than their padding, with real values too
        return None
    finally:
        log.disabled = False
        for decoder in tiling:
            decoder.use_tiling = False


def _measure_updates(
    policy: DiffusersPolicy, meta: MetaNetworks, row: Row, state: tuple[torch.Tensor, ...], *, checkpointed: bool
) -> tuple[list[Peaks | None], list[Kept]]:
    """Return the peaks of a step with its backward pass, and the sizes of its graph: [without, with checkpointing]."""
    networks = policy.modules.values()
    meta.with_gradients(networks)
    sizes: list[tuple[Peaks | None, Kept]] = [(None, Kept(once=0, each=0))] * 2
    if not checkpointed:
        sizes[0] = _measure_update(policy, meta, row, state)
    if all(getattr(network, "_supports_gradient_checkpointing", False) for network in networks):
        checkpoint_gradients(networks)
        sizes[1] = _measure_update(policy, meta, row, state)
    return [peaks for peaks, _ in sizes], [graph for _, graph in sizes]


def _measure_update(
    policy: DiffusersPolicy, meta: MetaNetworks, row: Row, state: tuple[torch.Tensor, ...]
) -> tuple[Peaks, Kept]:
    with meta.phase() as live:
        velocity = policy.walk.velocity(state, policy.sigmas[0], [row])
        once, each = live.parts
        cast("torch.Tensor", sum(v.float().square().mean() for v in velocity)).backward()
        return live.peaks, Kept(once=once, each=each)
