"""Runs of the tiny SD3, whose reward is how bright a picture is."""

import tiny
from opened import Opened

from flowgrpo import config
from flowgrpo.data.prompts import Prompt
from flowgrpo.flow.pipeline.networks.switches import checkpoint_gradients
from flowgrpo.flow.pipeline.policy import DiffusersPolicy
from flowgrpo.flow.trainer import flow_loop
from flowgrpo.training.weights.trained_weights import Weights, lora_config
from rewards import Reward


def pictures(folder, algorithm, *, lora=True, autocast=None, checkpointing=False, trees=None, rewards=None, **train):
    """Build a run; `lora` trains adapters in place of all weights, and `train` are keys of that section."""
    policy = DiffusersPolicy(tiny.sd3(), tiny.CALLS["sd3"], autocast=autocast)
    written = {
        "model": {"path": "model", **({} if lora else {"lora": None})},
        "algorithm": algorithm,
        "train": {"iterations": 1, "groups": 2, "group_size": 6, "updates": 1, "micro_batch": 8, **train},
        "eval": {"save": 0},
        "run": {"name": "r", "dir": str(folder), "trees": trees},
    }
    chosen = config.validate(written)
    if checkpointing:
        checkpoint_gradients(policy.modules.values())
    weights = Weights(
        policy.modules,
        lora_config(2, 4.0, "auto", policy.modules) if lora else None,
        reference=chosen.algorithm.reference,
        old=chosen.algorithm.old,
    )
    chosen.run.folder.mkdir(parents=True, exist_ok=True)
    prompts = [Prompt("a red circle"), Prompt("a blue square of two circle")]
    rewards = rewards or [Reward("mean", lambda images, prompts: [float(image.mean()) for image in images])]
    return Opened(flow_loop(chosen, policy, weights, train_prompts=prompts, rewards=rewards))
