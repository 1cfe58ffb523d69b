"""What a run allocates on its device, found by its own pipeline with networks of real size that hold no numbers.

Only configs are read. The pipeline, its schedule, its latents and our policy run as ever, on small real tensors; inside the
networks tensors have shapes alone (see `training.hollow`). Guided branches, checkpointing, adapters and a quantised base are
all counted, for they run.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from flowgrpo.data.prompts import Row
from flowgrpo.flow import start
from flowgrpo.flow.config import Config, Model
from flowgrpo.flow.pipeline import guidance, loading, traits, weightless
from flowgrpo.flow.pipeline.policy import DiffusersPolicy
from flowgrpo.flow.pipeline.switches import ENTRANCES, checkpoint_gradients, decoders
from flowgrpo.training import quantise
from flowgrpo.training.hollow import Hollow, size
from flowgrpo.training.hub import Shape
from flowgrpo.training.weights import Weights, lora_config
from rewards.compute import DTYPES


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Sizes of a pipeline, and what its calls allocate for one row beside them, in bytes.

    Attributes:
        components: of each component, its weights as they are loaded.
        shapes: of the tensors of the networks that are trained or adapted, by component and name.
        width: bytes of a weight that is not quantised.
        trained: how many numbers are trained.
        state: of one latent state in float32.
        encode: one prompt.
        rollout: a step without gradients.
        decode: a sample.
        decode_tiled: a sample in tiles; None where the decoder has no tiling.
        update: a step with gradients, and its backward pass; not measured, 0, where the config has checkpointing.
        update_checkpointed: the same with `model.gradient_checkpointing`; None where a network does not support it.
    """

    components: dict[str, int]
    shapes: dict[str, dict[str, Shape]]
    width: int
    trained: int
    state: int
    encode: int
    rollout: int
    decode: int
    decode_tiled: int | None
    update: int
    update_checkpointed: int | None


def trial(config: Config, folder: str, row: Row) -> Trial:
    """Measure a run's calls.

    Args:
        folder: of the pipeline's configs.
        row: the prompt that is tried, best the longest.

    Raises:
        InputError: the config asks for what the pipeline has not.
    """
    model, hollow = config.model, Hollow()
    pipe = weightless.pipeline(folder, DTYPES[model.dtype])
    networks = {name: m for name, m in pipe.components.items() if isinstance(m, torch.nn.Module)}
    trained = traits.networks(pipe)
    components = {name: size(network) for name, network in networks.items()}
    shapes = {
        name: {path: tuple(p.shape) for path, p in network.named_parameters()} for name, network in trained.items()
    }
    full_in_half = model.lora is None and model.dtype != "float32"
    policy = DiffusersPolicy(
        pipe,
        {**loading.embedded.call_of(model.path), **model.call},
        autocast=DTYPES[model.dtype] if full_in_half else None,
    )
    numbers = _trainable(model, policy)
    for network in networks.values():
        hollow.empty(network, ENTRANCES if network in decoders(pipe).values() else ("forward",))
    with policy.call_overrides(**guidance.training_call(model.guidance, policy)):
        with torch.no_grad():
            with hollow.phase() as live:
                policy.prepare([row])
                encode = live.peak
            with hollow.phase() as live:
                state = policy.start([row])
                rollout = live.peak
            decode, tiled = _decode(policy, hollow, row, state)
        update, checkpointed = _update(policy, hollow, row, state, checkpointed=model.gradient_checkpointing)
    return Trial(
        components=components,
        shapes=shapes,
        width=torch.finfo(DTYPES[model.dtype]).bits // 8,
        trained=numbers,
        state=4 * sum(x.numel() for x in state),
        encode=encode,
        rollout=rollout,
        decode=decode,
        decode_tiled=tiled,
        update=update,
        update_checkpointed=checkpointed,
    )


def _trainable(model: Model, policy: DiffusersPolicy) -> int:
    """Quantise, adapt and unfreeze the networks of a policy as a run does; return how many numbers are trained."""
    for network in policy.modules.values() if model.quantise in quantise.FORMS else ():
        quantise.quantise(network, model.quantise)
    lora = start.adapters(model) or (
        model.lora and lora_config(model.lora.rank, model.lora.alpha, model.lora.targets, policy.modules)
    )
    with torch.device("meta"):
        weights = Weights(policy.modules, lora)
    return sum(p.numel() for p in weights.parameters)


def _decode(
    policy: DiffusersPolicy, hollow: Hollow, row: Row, state: tuple[torch.Tensor, ...]
) -> tuple[int, int | None]:
    """What decoding allocates, whole and in tiles."""
    with hollow.phase() as live:
        policy.walk.decode(state, [row], by_landing=False)
        whole = live.peak
    tiling = [d for d in decoders(policy.pipe).values() if hasattr(d, "enable_tiling") and hasattr(d, "use_tiling")]
    if not tiling:
        return whole, None
    for decoder in tiling:
        decoder.enable_tiling()
    log = logging.getLogger("torch._subclasses.fake_tensor")
    log.disabled = True  # what it raises is told by None
    try:
        with hollow.phase() as live:
            policy.walk.decode(state, [row], by_landing=False)
            return whole, live.peak
    except RuntimeError:  # some leave a tile that is smaller than their padding, with numbers too
        return whole, None
    finally:
        log.disabled = False


def _update(
    policy: DiffusersPolicy, hollow: Hollow, row: Row, state: tuple[torch.Tensor, ...], *, checkpointed: bool
) -> tuple[int, int | None]:
    """What a step and its backward pass allocate, without checkpointing and with it."""
    networks = policy.modules.values()
    hollow.with_gradients(networks)
    whole = 0 if checkpointed else _learnt(policy, hollow, row, state)
    if not all(getattr(network, "_supports_gradient_checkpointing", False) for network in networks):
        return whole, None
    checkpoint_gradients(networks)
    return whole, _learnt(policy, hollow, row, state)


def _learnt(policy: DiffusersPolicy, hollow: Hollow, row: Row, state: tuple[torch.Tensor, ...]) -> int:
    with hollow.phase() as live:
        velocity = policy.walk.velocity(state, policy.sigmas[0], [row])
        sum(v.float().square().mean() for v in velocity).backward()
        return live.peak
