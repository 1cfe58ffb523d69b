"""Training settings of the source of each preset (steps, groups, learning rate and so on), as configuration keys.

A run does not use them, except those of `presets.BESIDE`; `flowgrpo plan` shows them next to the run's. `AROUND` are
the keys that we looked up in every source. `NOT_SAID` has the keys in `AROUND` that a preset's source does not give. Our
own presets have no source: their rows are empty, and they are not in `NOT_SAID`. `MODELS` names the source's model.

If a source counts groups or optimizer steps for each GPU, the numbers here are multiplied by its script's number of
GPUs. The code of Flow-GRPO and of DGPO moves its average twice in an optimizer step, once for each of two
micro-batches, so that its decay is in fact 0.81, not 0.9.
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


_KEYS = {"steps": "model.call.num_inference_steps", "rate": "train.learning_rate", "norm": "train.max_grad_norm"}


def _guidance(scale: float, guidance: str = "pipeline") -> dict[str, Any]:
    return {"model.guidance": guidance, "model.call.guidance_scale": scale}


def _loop(**numbers: Any) -> dict[str, Any]:
    """Return `numbers` by configuration key: the key that `_KEYS` gives for a name, else `train.` and the name."""
    return {_KEYS.get(name, f"train.{name}"): value for name, value in numbers.items()}


# TempFlow-GRPO's base config, which has the learning rate, was not available.
_TEMPFLOW = _loop(steps=10, groups=48, group_size=24, updates=2, split="samples", ema=_EIGHTH)
_FLOW_GRPO = {**_TEMPFLOW, **_loop(rate=3e-4, norm=1.0)}
_FLUX = {**_guidance(3.5), **_loop(split="samples", rate=1e-5, norm=1.0, ema=None)}  # FLUX.1's embedded guidance
_STUDY = {**_loop(steps=10, groups=48, group_size=24, updates=1, rate=3e-4, norm=5.0, ema=_AVERAGE), **_UNGUIDED}
_SMALL = {**_loop(updates=1, rate=3e-4, norm=1.0, ema=_EIGHTH), **_guidance(4.5, "rollout")}  # Flow-GRPO, DGPO
_PAIR = {**_loop(steps=40, groups=1, group_size=24), **_SMALL}  # configs for one GPU

PUBLISHED: dict[str, dict[str, Any]] = {
    "flow_grpo": {**_FLOW_GRPO, **_guidance(4.5)},
    "flow_grpo_fast": {**_FLOW_GRPO, **_UNGUIDED},
    "flow_grpo_window": {},
    "mix_grpo": {**_FLUX, **_loop(steps=25, groups=32, group_size=12, updates=4)},
    "dance_grpo": {**_FLUX, **_loop(steps=16, groups=16, group_size=12, updates=3)},
    "pref_grpo": {**_FLUX, **_loop(steps=25, groups=64, group_size=8, updates=2)},
    # GSM8K and Qwen3-1.7B on two GPUs. The source trains twice on each batch.
    "mc_grpo": _loop(groups=16, group_size=9, updates=1, rate=2e-6, ema=None),
    "grpo_guard": {**_FLOW_GRPO, **_guidance(4.5), "train.learning_rate": 1e-4},
    "tempflow": {**_TEMPFLOW, **_guidance(4.5)},
    "tempflow_fast": {},
    "adaptive": {},
    # The paper has a weight average of decay 0.995, which the code does not use. An optimizer step takes 12 of 436
    # edges, of two trees on a GPU.
    "branch_grpo": {**_FLUX, **_loop(steps=20, groups=16, group_size=16, updates=36, split="edges")},
    "branch_grpo_mix": {**_FLUX, **_loop(steps=20, groups=16, group_size=16, split="edges")},
    "dense_grpo": _loop(steps=10, group_size=24, rate=3e-4),  # its global batch is 144
    "stepwise_flow_grpo": _loop(steps=10),
    "vgpo": _loop(steps=10),
    "sage_grpo": {
        **_guidance(6.0),
        **_loop(steps=20, groups=16, group_size=4, updates=1, rate=1e-5, norm=1.0, ema=None),
    },
    "ctpo": _loop(groups=512, group_size=8, updates=16, split="groups", rate=1e-6),  # the loop of a language model
    "flow_dppo": {
        **_loop(steps=10, groups=48, group_size=16, updates=2, rate=3e-4),
        "train.optimizer.weight_decay": 0.0,
        **_loop(norm=1.0, ema=None),
        **_UNGUIDED,
    },
    "opd": {**_loop(steps=10, groups=8, group_size=8, updates=2, rate=1e-4, norm=1.0, ema=None), **_UNGUIDED},
    "epg": _STUDY,
    "pepg": _STUDY,
    "elbo_grpo": {**_loop(steps=10, ema=_AVERAGE), **_UNGUIDED},
    "nft": {**_STUDY, **_loop(norm=1.0)},
    "sol_rl": {**_STUDY, **_loop(norm=0.002, draft=DRAFT)},
    "awm": {**_STUDY, **_loop(steps=14, groups=72, norm=1.0, ema={**_AVERAGE, "decay": 0.99})},
    "awm_fast": {},
    "awm_split": {},
    "awm_tree": {},
    "awm_late": {},
    "awm_brush": {},
    "ram": {**_loop(steps=10, ema=_AVERAGE), **_UNGUIDED},
    # The config of its full run on 8 GPUs. The rate is the middle one of three that it compares.
    "rvm": {
        **_loop(steps=4, groups=32, group_size=8, updates=2, split="samples", rate=1e-5, norm=1.0, ema=None),
        "train.optimizer.weight_decay": 1e-4,
        **_UNGUIDED,
    },
    # The source moves the average every 10 iterations, with a decay of at most (1 + n) / (10 + n) after iteration n.
    "crd": {**_STUDY, **_loop(updates=2, norm=1.0, ema={"decay": 0.995, "every": 20, "warmup": 19})},
    "rwr": _PAIR,
    "sft_best": _PAIR,
    "dpo": _PAIR,
    "seppo": _loop(groups=2048, group_size=2, updates=1),
    "dgpo": {**_loop(steps=10, groups=8, group_size=16), **_SMALL},
    "gdro": _loop(group_size=16, rate=3e-4),
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
OF_TEXTS = ("ctpo", "mc_grpo")  # their sources train language models, without guidance or sampling steps
MODELS = {  # that the sources' numbers are for, as far as their files say it
    **dict.fromkeys(("flow_grpo", "flow_grpo_fast"), "Stable Diffusion 3.5 medium"),
    **dict.fromkeys(("mix_grpo", "dance_grpo", "pref_grpo", "branch_grpo", "branch_grpo_mix"), "FLUX.1 dev"),
    "mc_grpo": "Qwen3-1.7B",
    "ctpo": "a language model",
}
