"""What the source of each preset sets around its method, as configuration keys and values.

A run has them only where it sets them, but for those of `presets.BESIDE`; `flowgrpo plan` shows both. `AROUND` is what every
source is asked for; what it does not say, or could not be read, stands in `NOT_SAID`. Rows of ours have neither.

Of a source that counts for each GPU, groups and optimizer steps are those of its script's number of GPUs. The code of
Flow-GRPO and of DGPO moves its average once for each micro-batch of an optimizer step: of two, by 0.81 in place of 0.9.
"""

from __future__ import annotations

from typing import Any

from flowgrpo.flow.methods.sample_presets import DRAFT

AROUND = (
    "model.guidance",
    "model.call.num_inference_steps",
    "train.groups",
    "train.group_size",
    "train.updates",
    "train.learning_rate",
    "train.ema",
)

_UNGUIDED = {"model.guidance": "none"}
_AVERAGE = {"decay": 0.9, "every": 1, "warmup": 10}
_EIGHTH = {**_AVERAGE, "every": 8}


def _guided(scale: float, guidance: str = "pipeline") -> dict[str, Any]:
    return {"model.guidance": guidance, "model.call.guidance_scale": scale}


_TEMPFLOW = {  # its config's base, with the learning rate, was not at hand
    "model.call.num_inference_steps": 10,
    "train.groups": 48,
    "train.group_size": 24,
    "train.updates": 2,
    "train.split": "samples",
    "train.ema": _EIGHTH,
}
_FLOW_GRPO = {**_TEMPFLOW, "train.learning_rate": 3e-4, "train.max_grad_norm": 1.0}
_FLUX = {
    **_guided(3.5),  # FLUX.1's own, one branch
    "train.split": "samples",
    "train.learning_rate": 1e-5,
    "train.max_grad_norm": 1.0,
    "train.ema": None,
}
_STUDY = {
    "model.call.num_inference_steps": 10,
    "train.groups": 48,
    "train.group_size": 24,
    "train.updates": 1,
    "train.learning_rate": 3e-4,
    "train.max_grad_norm": 5.0,
    "train.ema": _AVERAGE,
    **_UNGUIDED,
}
_SMALL = {  # of Flow-GRPO's and DGPO's configs
    "train.updates": 1,
    "train.learning_rate": 3e-4,
    "train.max_grad_norm": 1.0,
    "train.ema": _EIGHTH,
    **_guided(4.5, "rollout"),
}
_PAIR = {"model.call.num_inference_steps": 40, "train.groups": 1, "train.group_size": 24, **_SMALL}  # of one GPU

PUBLISHED: dict[str, dict[str, Any]] = {
    "flow_grpo": {**_FLOW_GRPO, **_guided(4.5)},
    "flow_grpo_fast": {**_FLOW_GRPO, **_UNGUIDED},
    "flow_grpo_window": {},
    "mix_grpo": {
        **_FLUX,
        "model.call.num_inference_steps": 25,
        "train.groups": 32,
        "train.group_size": 12,
        "train.updates": 4,
    },
    "dance_grpo": {
        **_FLUX,
        "model.call.num_inference_steps": 16,
        "train.groups": 16,
        "train.group_size": 12,
        "train.updates": 3,
    },
    "pref_grpo": {
        **_FLUX,
        "model.call.num_inference_steps": 25,
        "train.groups": 64,
        "train.group_size": 8,
        "train.updates": 2,
    },
    "mc_grpo": {  # of GSM8K and Qwen3-1.7B, on two GPUs; each batch is gone over twice there
        "train.groups": 16,
        "train.group_size": 9,
        "train.updates": 1,
        "train.learning_rate": 2e-6,
        "train.ema": None,
    },
    "grpo_guard": {**_FLOW_GRPO, **_guided(4.5), "train.learning_rate": 1e-4},
    "tempflow": {**_TEMPFLOW, **_guided(4.5)},
    "tempflow_fast": {},
    "adaptive": {},
    "branch_grpo": {
        **_FLUX,  # its paper has an average of 0.995, which the code does not take
        "model.call.num_inference_steps": 20,
        "train.groups": 16,
        "train.group_size": 16,
        "train.updates": 36,  # an optimizer step each 12 of 436 edges, two trees on a GPU
        "train.split": "edges",
    },
    "branch_grpo_mix": {
        **_FLUX,
        "model.call.num_inference_steps": 20,
        "train.groups": 16,
        "train.group_size": 16,
        "train.split": "edges",
    },
    "dense_grpo": {  # and a global batch of 144, of which a group is 24
        "model.call.num_inference_steps": 10,
        "train.group_size": 24,
        "train.learning_rate": 3e-4,
    },
    "stepwise_flow_grpo": {"model.call.num_inference_steps": 10},
    "vgpo": {"model.call.num_inference_steps": 10},
    "sage_grpo": {
        **_guided(6.0),
        "model.call.num_inference_steps": 20,
        "train.groups": 16,
        "train.group_size": 4,
        "train.updates": 1,
        "train.learning_rate": 1e-5,
        "train.max_grad_norm": 1.0,
        "train.ema": None,
    },
    "ctpo": {  # the loop of a language model
        "train.groups": 512,
        "train.group_size": 8,
        "train.updates": 16,
        "train.split": "groups",
        "train.learning_rate": 1e-6,
    },
    "flow_dppo": {
        "model.call.num_inference_steps": 10,
        "train.groups": 48,
        "train.group_size": 16,
        "train.updates": 2,
        "train.learning_rate": 3e-4,
        "train.optimizer.weight_decay": 0.0,
        "train.max_grad_norm": 1.0,
        "train.ema": None,
        **_UNGUIDED,
    },
    "opd": {
        "model.call.num_inference_steps": 10,
        "train.groups": 8,
        "train.group_size": 8,
        "train.updates": 2,
        "train.learning_rate": 1e-4,
        "train.max_grad_norm": 1.0,
        "train.ema": None,
        **_UNGUIDED,
    },
    "epg": _STUDY,
    "pepg": _STUDY,
    "elbo_grpo": {
        "model.call.num_inference_steps": 10,
        "train.ema": _AVERAGE,
        **_UNGUIDED,
    },
    "nft": {**_STUDY, "train.max_grad_norm": 1.0},
    "sol_rl": {**_STUDY, "train.max_grad_norm": 0.002, "train.draft": DRAFT},
    "awm": {
        **_STUDY,
        "model.call.num_inference_steps": 14,
        "train.groups": 72,
        "train.max_grad_norm": 1.0,
        "train.ema": {**_AVERAGE, "decay": 0.99},
    },
    "awm_fast": {},
    "ram": {"model.call.num_inference_steps": 10, "train.ema": _AVERAGE, **_UNGUIDED},
    "crd": {
        **_STUDY,
        "train.updates": 2,
        "train.max_grad_norm": 1.0,
        # Every 10 iterations, with (1 + n) / (10 + n) of their number n.
        "train.ema": {"decay": 0.995, "every": 20, "warmup": 19},
    },
    "rwr": _PAIR,
    "sft_best": _PAIR,
    "dpo": _PAIR,
    "seppo": {"train.groups": 2048, "train.group_size": 2, "train.updates": 1},
    "dgpo": {"model.call.num_inference_steps": 10, "train.groups": 8, "train.group_size": 16, **_SMALL},
    "gdro": {"train.group_size": 16, "train.learning_rate": 3e-4},
}

_ALL_BUT_STEPS = tuple(key for key in AROUND if key != "model.call.num_inference_steps")
_LOOP = ("train.groups", "train.group_size", "train.updates", "train.learning_rate")
NOT_SAID: dict[str, tuple[str, ...]] = {
    "ctpo": ("train.ema",),
    "tempflow": ("train.learning_rate",),
    "branch_grpo_mix": ("train.updates",),
    "dense_grpo": ("model.guidance", "train.groups", "train.updates", "train.ema"),
    "stepwise_flow_grpo": _ALL_BUT_STEPS,
    "vgpo": _ALL_BUT_STEPS,
    "elbo_grpo": _LOOP,
    "ram": _LOOP,
    "seppo": ("model.guidance", "model.call.num_inference_steps", "train.learning_rate", "train.ema"),
    "gdro": ("model.guidance", "model.call.num_inference_steps", "train.groups", "train.updates", "train.ema"),
}
OF_TEXTS = ("ctpo", "mc_grpo")  # their sources are of language models, which have no guidance and no such steps
