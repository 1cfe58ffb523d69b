"""Loop numbers and sizes in the released code of each preset of texts, as configuration keys.

A run does not use them, except those of `presets.BESIDE`; `flowgrpo plan` shows them next to the run's.
"""

from __future__ import annotations

from typing import Any

from flowgrpo.mdlm.methods import tree_presets
from flowgrpo.mdlm.methods.presets import BESIDE

_ALL_WEIGHTS = {"model.lora": None, "train.ema": None, "train.updates": 1}
_ADAM = {"train.optimizer.betas": [0.9, 0.99], "train.optimizer.weight_decay": 0.1, "train.max_grad_norm": 0.2}
_D1 = {  # dllm-reasoning/d1, for GSM8K on 8 devices; the code of many methods started from it
    "model.length": 256,
    "model.lora.rank": 128,
    "model.lora.alpha": 64,
    "model.lora.targets": ["q_proj", "k_proj", "v_proj", "up_proj"],  # those of its seven that LLaDA has
    "algorithm.decoder.steps": 128,
    "algorithm.decoder.region.block_length": 32,
    "train.groups": 16,
    "train.group_size": 6,
    "train.passes": 12,
    "train.updates": 1,
    "train.learning_rate": 3e-6,
    "train.ema": None,
    **_ADAM,
}

MODELS = {"diffu_grpo": "LLaDA-8B-Instruct", "coupled_grpo": "DiffuCoder-7B"}  # that a row's numbers are for
PUBLISHED: dict[str, dict[str, Any]] = {
    "diffu_grpo": _D1,
    "diffu_grpo_fast": {},  # ours
    "coupled_grpo": {  # for DiffuCoder-7B
        **_ALL_WEIGHTS,
        "model.length": 256,
        "algorithm.decoder.steps": 256,
        "train.groups": 8,
        "train.group_size": 10,
        "train.passes": 2,
        "train.learning_rate": 1e-6,
        "train.schedule.name": "cosine",
        "train.schedule.floor": 0.1,
        **_ADAM,
    },
    "gdpo": {**_D1, "train.groups": 32, "train.learning_rate": 3e-7},  # the recipe's
    "bgpo": {  # for mathematics
        **_ALL_WEIGHTS,
        "model.length": 512,
        "algorithm.decoder.steps": 256,
        "algorithm.decoder.region.block_length": 32,
        "train.groups": 16,
        "train.group_size": 8,
        "train.passes": 1,
        "train.learning_rate": 5e-7,
        "train.optimizer.weight_decay": 0.01,
    },
    "espo": {  # for GSM8K
        **_D1,
        "algorithm.decoder.steps": 256,
        "train.passes": 8,
        "train.optimizer.weight_decay": 0.01,
    },
    "cj_grpo": {**_D1, "algorithm.decoder.region.block_length": 128},
    "just_grpo": {
        **_ALL_WEIGHTS,
        "model.length": 256,
        "algorithm.decoder.steps": 256,
        "train.groups": 64,
        "train.group_size": 16,
        "train.passes": 1,
        "train.learning_rate": 5e-6,
        "train.optimizer.weight_decay": 0.0,
        "train.max_grad_norm": 1.0,
    },
    "igpo": {**_D1, "train.groups": 64, "train.group_size": 8, "train.passes": 4, "train.learning_rate": 5e-7},
    "spg": {**_D1, "algorithm.likelihood.size": 32, "train.passes": 4},
    "trace_rl": {  # for LLaDA; an update takes 256 merged steps: 4 answers of full length
        "model.lora": None,
        "train.updates": 64,
        "train.split": "samples",
        "model.length": 512,
        "algorithm.decoder.steps": 512,
        "algorithm.decoder.region.block_length": 32,
        "train.groups": 32,
        "train.group_size": 8,
        "train.passes": 1,
        "train.learning_rate": 1e-6,
        "train.ema": None,
        "train.optimizer.weight_decay": 0.0,
        "train.max_grad_norm": 1.0,
    },
    "ebpo": {  # DARE's for LLaDA2-mini and mathematics, whose 1,024 steps for a block of 32 are at least one token a step
        **_ALL_WEIGHTS,
        "model.length": 2048,
        "algorithm.decoder.steps": 2048,
        "algorithm.decoder.region.block_length": 32,
        "train.groups": 16,
        "train.group_size": 8,
        "train.passes": 1,
        "train.learning_rate": 5e-7,
        "train.optimizer.weight_decay": 0.01,
        "train.max_grad_norm": 1.0,
    },
    "co_grpo": {},  # not known without its code
    "spo": {  # for Qwen3-8B; one answer of a prompt
        **_ALL_WEIGHTS,
        "model.length": 16384,
        "train.groups": 768,
        "train.passes": 1,
        "train.updates": 8,
        "train.learning_rate": 1e-6,
        "train.half_life": {"by": "log_ratio", "after": 0.06, "keep": [0.875, 0.96]},
    },
    "bnpo": {  # for Qwen2.5-Math-7B
        **_ALL_WEIGHTS,
        "model.length": 3072,
        "train.groups": 32,
        "train.group_size": 16,
        "train.passes": 1,
        "train.learning_rate": 1e-6,
        "train.schedule.warmup": 10,
        "train.optimizer.weight_decay": 0.0,
        "train.max_grad_norm": 1.0,
    },
    "dcpo": {  # for Qwen2.5-Math-7B on one machine
        **_ALL_WEIGHTS,
        "model.length": 3072,
        "train.groups": 512,
        "train.group_size": 16,
        "train.passes": 1,
        "train.updates": 64,
        "train.learning_rate": 1e-6,
        "train.schedule.warmup": 10,
        "train.optimizer.weight_decay": 0.1,
        "train.max_grad_norm": 1.0,
    },
    "riskpo": {  # for DeepSeek-R1-Distill-Qwen-1.5B
        **_ALL_WEIGHTS,
        "model.length": 3072,
        "train.groups": 512,
        "train.group_size": 10,
        "train.passes": 1,
        "train.updates": 4,
        "train.learning_rate": 1e-6,
    },
    "dars": {  # for Qwen2.5-Math-1.5B
        **_ALL_WEIGHTS,
        **BESIDE["dars"],
        "model.length": 3072,
        "train.groups": 3072,
        "train.group_size": 8,
        "train.passes": 2,
        "train.learning_rate": 5e-6,
        "train.optimizer.weight_decay": 0.01,
        "train.max_grad_norm": 1.0,
    },
    **tree_presets.PUBLISHED,
}
