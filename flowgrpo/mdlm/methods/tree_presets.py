"""Presets of text trees.

d-TreeRPO is for masked-diffusion models. The others are for models that write from left to right, with these departures
in common, besides those of `presets`:

 a. Answers are decoded from left to right by a masked-diffusion model, one token a step.
 b. Branches split at fixed shares of the steps; there at segments, at turns, or where answers happen to agree.
"""

from __future__ import annotations

from typing import Any

from flowgrpo.schema.preset_overrides import PresetRow

Options = dict[str, Any]
_STD = {"name": "group_mean", "std": "group", "eps": 1e-4, "ddof": 0}
_MEAN = {"name": "group_mean", "std": "none"}


def _row(
    credit: Options,
    baseline: Options,
    *,
    tree: Options | None = None,
    decoder: Options | None = None,
    likelihood: Options | None = None,
    objective: Options | None = None,
    aggregation: str = "token_mean",
) -> PresetRow:
    return {
        "decoder": decoder or {"name": "left_to_right"},
        "tree": tree or {"name": "branch", "factor": 2, "splits": [0.25, 0.5]},
        "schedule": {"name": "none"},
        "hints": {"name": "none"},
        "likelihood": likelihood or {"name": "trajectory"},
        "credit": credit,
        "baseline": baseline,
        "objective": objective or {"name": "token_ratio", "clip_range": 0.2},
        "aggregation": {"name": aggregation},
    }


PRESETS: dict[str, PresetRow] = {
    # d-TreeRPO: arXiv 2512.09675 and THU-BPM/d-TreeRPO: four branches leave the prompt, and four leave each half-way.
    # 1. The weight and the temperature of the self-distillation move once an iteration; there in each optimizer step.
    # 2. An optimizer step takes whole groups; there the branches that leave one canvas.
    # 3. Tokens behind the end of the finished answer are left out; there those behind an end on the branch's own canvas.
    "d_tree_rpo": _row(
        {"name": "siblings", "weights": "branches"},
        {"name": "leave_one_out"},
        tree={"name": "branch", "factor": 4, "splits": [0.5]},
        decoder={"name": "low_confidence", "proposal": {"temperature": 0.9}},
        likelihood={"name": "trajectory", "shrink": "branch"},
        objective={
            "name": "token_ratio",
            "clip_range": 0.4,
            "kl": {"form": "k3", "beta": 0.01, "target": "base"},
            "distillation": {"weight": 3e-3, "growth": 2.0, "temperature": 2.0, "power": 0.7},
        },
        aggregation="step_mean",
    ),
    # TEMPO: arXiv 2509.18314, reconstructed: (r - mean) / std plus V(child) - V(parent) of standardised rewards.
    # 1. The first term is a branch's value, not its answer's reward; the sum over its answers is the same.
    # 2. The standard deviation is that of the values of all branches; there of the answers' rewards.
    # 3. Where no other reward of the siblings is known, the first term counts twice; there the second is 0.
    "tempo": _row({"name": "nested", "group": 1.0, "siblings": 1.0}, {**_STD, "scale": 2.0}),
    # SPO-tree: arXiv 2505.23564 and AIFrameResearch/SPO, where trees are of 6 x 6 x 6 answers.
    # 1. All tokens are trained on; there only those of a probability below 0.9.
    "spo_tree": _row({"name": "siblings"}, {**_MEAN, "drop_zero": True}),
    # TreePO: arXiv 2508.17445 and its code: a mean over levels, whitened over the batch.
    # 1. Levels below a branch have no part in its advantage; there they add noise of mean 0 to it.
    # 2. All levels weigh alike, as in the paper; in its code a level weighs as many answers as it compares.
    # 3. Branches weigh alike in the mean and the standard deviation of the batch; there tokens do.
    "tree_po": _row(
        {"name": "nested", "group": 1.0, "between": 1.0, "siblings": 1.0}, {**_MEAN, "combine": "decoupled"}
    ),
    # GiGPO: arXiv 2505.10978 and its code: the advantage of the answer plus that among answers from the same state.
    # 1. Rewards come at the end only, so that their discount plays no part.
    # 2. The first term is a branch's value, not its answer's reward; the sum over its answers is the same.
    # 3. Where no other reward of the siblings is known, the first term counts twice; there the second is 0.
    "gigpo": _row({"name": "nested", "group": 1.0, "siblings": 1.0}, {**_MEAN, "scale": 2.0}),
    # HGPO: arXiv 2602.22817, reconstructed: nested groups of longer and longer shared history, of weights k + 1.
    # 1. A group shares its first branches; there the present state and the last ones before it.
    # 2. The standard deviation is that of the values of all branches; there of each group, or none.
    "hgpo": _row({"name": "nested", "group": 1.0, "between": 1.0, "siblings": 1.0, "growth": 1.0}, _STD),
    # SALT: arXiv 2510.20022, reconstructed: advantages of answers are averaged over the steps that they share.
    # 1. The standard deviation is that of the values of all branches; there of the answers' rewards.
    "salt": _row({"name": "nested", "group": 1.0, "siblings": 0.0}, _STD),
}

# For each preset: the loop's numbers and the sizes in its released code.
PUBLISHED: dict[str, dict[str, Any]] = {
    "d_tree_rpo": {  # for GSM8K
        "model.length": 256,
        "model.lora.rank": 128,
        "model.lora.alpha": 64,
        "model.quantise": "nf4",
        "algorithm.decoder.steps": 128,
        "algorithm.decoder.region.block_length": 32,
        "train.groups": 4,  # of a device
        "train.group_size": 16,
        "train.passes": 12,
        "train.updates": 1,
        "train.learning_rate": 3e-5,
        "train.ema": None,
        "train.optimizer.betas": [0.9, 0.99],
        "train.optimizer.weight_decay": 0.1,
        "train.max_grad_norm": 0.2,
    },
    # The sources' numbers of the others are of models that write from left to right.
    **{name: {} for name in ("tempo", "spo_tree", "tree_po", "gigpo", "hgpo", "salt")},
}
