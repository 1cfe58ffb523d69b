"""The flow models that `bench_flow.py` and `gpu_check.py` measure, and training loops of them before an iteration."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import random_pipelines
import torch
from accelerate import Accelerator
from diffusers import SD3Transformer2DModel

from flowgrpo import config
from flowgrpo.data import embedded, prompts
from flowgrpo.flow.config import Config
from flowgrpo.flow.pipeline.loading.load import load_pipeline
from flowgrpo.flow.pipeline.networks.switches import checkpoint_gradients
from flowgrpo.flow.pipeline.policy import DiffusersPolicy
from flowgrpo.flow.rollouts.prompt_encoding import build_rows, longest_and_shortest
from flowgrpo.flow.setup import trainable
from flowgrpo.flow.trainer import flow_loop
from flowgrpo.training.loop import Loop
from flowgrpo.training.scoring import scorer
from flowgrpo.training.weights.trained_weights import Weights
from rewards.compute import DTYPES

KINDS = {
    "chain": {"preset": "flow_grpo", "objective": {"kl": {"beta": 0.0}}},
    "window": {"preset": "flow_grpo_fast"},
    "brush": {
        "preset": "tempflow_fast",
        "tree": {"branches": 8, "profile": [8, 8]},
        "objective": {"kl": {"beta": 0.0}},
    },
    "branch": {"preset": "branch_grpo"},
    "twigs": {"preset": "stepwise_flow_grpo", "tree": {"length": 1}},
}


@dataclass(frozen=True)
class Size:
    """A model, and the calls that are measured.

    Attributes:
        rows: measured numbers of rows in a call.
        group: samples of a group.
        lora: adapters; None if all weights are trained.
        transformer: builds a transformer in place of the embedded model's.
        config: built-in config whose pipeline gets random weights; None for the embedded model.
        call: arguments that override the call of that config, or of the embedded model.
        dtype: of the weights.
        changes: changes of the configs of a real model's components, by component.
    """

    rows: Sequence[int]
    group: int
    lora: dict[str, Any] | None = None
    transformer: Callable[[], torch.nn.Module] | None = None
    config: str | None = None
    call: Mapping[str, Any] = field(default_factory=lambda: {"num_inference_steps": 10})
    dtype: str = "float32"
    changes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def wide() -> torch.nn.Module:
    """Return a random transformer of 24 layers, 256 wide, that fits the embedded pipeline."""
    sizes = {"num_layers": 24, "num_attention_heads": 8, "attention_head_dim": 32, "caption_projection_dim": 256}
    before = load_pipeline("shapes", torch.float32).transformer.config
    torch.manual_seed(0)
    return SD3Transformer2DModel.from_config({**before, **sizes})


SIZES = {
    "shapes": Size((8, 32), 32),
    "wide": Size((8,), 8, {"rank": 8}, wide),
    "sd35-medium": Size((8,), 24, {"rank": 32, "alpha": 64}, config="sd35-medium", dtype="bfloat16"),
    "flux1-dev": Size((4,), 8, {"rank": 32, "alpha": 64}, config="flux1-dev", dtype="bfloat16"),
    "wan21-1.3b": Size((8,), 8, {"rank": 32, "alpha": 64}, config="wan21-1.3b", dtype="bfloat16"),
}

VAE = {"block_out_channels": [8, 8, 8, 8], "norm_num_groups": 4, "layers_per_block": 1}
SHRUNK_ENCODERS = {
    "text_encoder": {"intermediate_size": 16, "d_ff": 16, "d_kv": 8, "num_heads": 2},
    "text_encoder_2": {"intermediate_size": 16, "d_ff": 16, "d_kv": 8, "num_heads": 2},
    "text_encoder_3": {"d_ff": 16, "d_kv": 8, "num_heads": 2},
}
SHRUNK = {  # changes that make the networks of real models small
    "sd35-medium": {
        "transformer": {
            "num_layers": 2,
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "caption_projection_dim": 32,
            "pos_embed_max_size": 16,
            "dual_attention_layers": [0],
        },
        "vae": VAE,
    },
    "flux1-dev": {
        "transformer": {
            "num_layers": 1,
            "num_single_layers": 1,
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "axes_dims_rope": [4, 6, 6],
        },
        "vae": VAE,
    },
    "wan21-1.3b": {
        "transformer": {"num_layers": 1, "num_attention_heads": 2, "attention_head_dim": 16, "ffn_dim": 32},
        "vae": {"base_dim": 8},
    },
}


def shrunk(name: str) -> Size:
    """Return a real model's size with small networks, pictures, group and schedule, in float32, for a CPU."""
    call = {"num_inference_steps": 3, "height": 32, "width": 32, "max_sequence_length": 8}
    if name == "wan21-1.3b":
        call["num_frames"] = 5
    return replace(
        SIZES[name],
        rows=(2,),
        group=2,
        lora={"rank": 2, "alpha": 4},
        call=call,
        dtype="float32",
        changes={**SHRUNK_ENCODERS, **SHRUNK[name]},
    )


def settings(size: Size, kind: str, rows: int, **train: Any) -> Config:
    """Return the config of a measured run: one group, unless `train` has more, and one optimizer step."""
    model: dict[str, Any] = {"path": "shapes", "lora": size.lora, "dtype": size.dtype}
    if size.config is not None:
        known = config.load(size.config).model
        shape = {"path": known.path, "gradient_checkpointing": known.gradient_checkpointing}
        model |= {"call": {**known.call, **size.call}, **shape}
    written = {
        "model": model,
        "prompts": {"train": "shapes:train", "eval": "shapes:eval"},
        "rewards": [{"use": f"{__file__}:brightness"}],
        "algorithm": KINDS[kind],
        "train": {"groups": 1, "group_size": size.group, "updates": 1, "micro_batch": rows, "ema": None, **train},
        "run": {"dir": tempfile.gettempdir(), "name": "bench"},
    }
    return config.validate(written)


def brightness(samples: torch.Tensor, prompts: Sequence[str]) -> torch.Tensor:
    """Return the mean brightness (B,) of pictures or videos, a reward that costs almost nothing."""
    return samples.flatten(1).mean(1)


def begun(size: Size) -> tuple[DiffusersPolicy, Weights]:
    """Return the policy of a size, on the GPU if there is one, and its trained weights."""
    model = settings(size, "chain", 1).model
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if size.config is None:
        pipe = load_pipeline("shapes", DTYPES[size.dtype])
        call = {**embedded.default_call("shapes"), **size.call}
        if size.transformer is not None:
            pipe.register_modules(transformer=size.transformer())
        pipe.to(device)
    else:
        call = model.call
        with random_pipelines.folder(model.path, size.changes) as place:
            pipe = random_pipelines.pipeline(place, DTYPES[model.dtype], device)
    full_in_half = size.lora is None and size.dtype != "float32"
    policy = DiffusersPolicy(pipe, call, autocast=DTYPES[size.dtype] if full_in_half else None)
    if model.gradient_checkpointing:
        checkpoint_gradients(policy.modules.values())
    weights = trainable(model, policy, ema=None)
    weights.to(device)
    return policy, weights


def most_groups() -> int:
    """Return the largest number of groups of a rollout: one for each prompt of the embedded model."""
    return len(prompts.load_split(settings(SIZES["shapes"], "chain", 1).prompts, "train"))


def trainer_of(policy: DiffusersPolicy, weights: Weights, chosen: Config) -> Loop:
    """Return the training loop of a run on prompts of the embedded model."""
    rows = prompts.load_split(chosen.prompts, "train")[: chosen.train.groups]
    rewards, _ = scorer.rewards(chosen.rewards, [])
    loop = flow_loop(chosen, policy, weights, rewards=rewards, train_prompts=rows, accelerator=Accelerator())
    loop.state.folder.mkdir(exist_ok=True)  # the report writes there
    policy.prepare(build_rows(longest_and_shortest(rows)))
    policy.start(build_rows(rows))
    return loop
