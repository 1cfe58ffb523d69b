"""Presets: each method is a row of seven choices, one on each axis, and a few numbers.

To add a method, add a row. A user can replace any choice and any number. No other code may depend on the name of a
method. The comment above a row gives its source and its numbered departures from the source: `here` is this row,
`there` or `the code` is the source. All rows share these departures, besides those of `flow.trainer`:

 1. Several rewards are summed by weight before they are compared, as in Flow-GRPO's code, except mix_grpo and pref_grpo.
 2. Samples of advantage 0 stay in the update and count in the mean of the loss, except in sft_best and for the pivot of
    mc_grpo. The code of Flow-GRPO and of TempFlow-GRPO leaves them out.
 3. Windows and trained steps are drawn once an iteration, for all samples. Flow-GRPO's code draws a window in each call
    of the pipeline. The code of DanceGRPO and of Pref-GRPO draws the trained steps for each sample.

The rows here have `likelihood: trajectory`; the rows with `likelihood: elbo` are in `sample_presets`. The training
settings of the sources (learning rate, number of groups and so on) are in `published`, costs and gains in `costs`.
`flowgrpo methods` prints the comment above a row: its first sentence names the method and its source.
"""

from __future__ import annotations

from flowgrpo.flow.methods import sample_presets
from flowgrpo.schema.preset_overrides import PresetRow

_GROUP_STD = {"name": "group_mean", "std": "group", "eps": 1e-8, "ddof": 1}
_GLOBAL_STD = {"name": "group_mean", "std": "global", "eps": 1e-4, "ddof": 0}
_PLAIN_STD = {"name": "group_mean", "std": "group", "eps": 1e-4, "ddof": 0}
_FLOW_SDE = {"name": "flow_sde", "level": 0.7}
_FLOW_KL = {"form": "flow_grpo", "beta": 0.04}
_EXACT_KL = {"form": "exact", "beta": 0.004}
_SHARED: PresetRow = {
    "tree": {"name": "chain"},
    "kernel": _FLOW_SDE,
    "likelihood": {"name": "trajectory"},
    "credit": {"name": "terminal"},
}
_FAST: PresetRow = {
    **_SHARED,
    "tree": {"name": "window", "size": 3, "move": "random"},
    "kernel": {"name": "cps", "level": 0.8, "log_prob": "constant_free"},
    "baseline": _GLOBAL_STD,
    "objective": {"name": "clip", "clip_range": 1e-5},
}
_TEMPFLOW: PresetRow = {
    **_SHARED,
    "credit": {"name": "siblings", "within": "seed"},
    "baseline": _PLAIN_STD,
    "objective": {"name": "clip", "clip_range": 1e-4, "step_weights": "noise_aware", "kl": _EXACT_KL},
}
_BRANCH: PresetRow = {
    **_SHARED,
    "kernel": {"name": "dance_sde", "level": 0.3},
    "credit": {"name": "depthwise", "weights": "uniform"},
    "baseline": {**_GROUP_STD, "min_std": 1e-6},
    "objective": {"name": "clip", "clip_range": 1e-3},
}

_ROWS: dict[str, PresetRow] = {
    # Flow-GRPO: arXiv 2505.05470 and its code.
    # 1. The last step is ODE, as in the newer code; the older one drew noise there and did not train it.
    # 2. beta 0.04 is the value for GenEval and OCR; PickScore has 0.01.
    "flow_grpo": {
        **_SHARED,
        "baseline": _GLOBAL_STD,
        "objective": {"name": "clip", "clip_range": 1e-4, "kl": _FLOW_KL},
    },
    # Flow-GRPO-Fast: the window configs of Flow-GRPO's code (arXiv 2505.05470; geneval_sd3_fast_nocfg,
    # pickscore_sd3_fast_nocfg, *_flux_fast).
    # 1. They sample and train without guidance; here that is model.guidance, which this row leaves as it is.
    "flow_grpo_fast": _FAST,
    # Ours: the window of flow_grpo_fast with the SDE of flow_grpo.
    "flow_grpo_window": {**_FAST, "kernel": {"name": "flow_sde", "level": 0.8}},
    # MixGRPO: arXiv 2507.21802, and the FLUX script of its code.
    # 1. The window stays at the end, as in the paper; the script goes back to the start.
    # 2. The last step is ODE and is never in the window.
    "mix_grpo": {
        **_SHARED,
        "tree": {"name": "window", "size": 4, "move": "sliding", "every": 25, "stride": 1, "start": "shared"},
        "baseline": {**_GROUP_STD, "combine": "per_reward"},
        "objective": {"name": "clip", "clip_range": 1e-4},
    },
    # DanceGRPO: arXiv 2505.07818, and the FLUX script of its code.
    # 1. The code scores the clean estimate of its last step, an ODE step. Here the last two steps are ODE: if a
    #    schedule ends just above 0 (SD3's at 0.0089), the very last step removes almost no noise.
    "dance_grpo": {
        **_SHARED,
        "tree": {"name": "chain", "start": "shared", "train_fraction": 0.6, "steps": [0, -2]},
        "kernel": {"name": "dance_sde", "level": 0.3},
        "baseline": _GROUP_STD,
        "objective": {"name": "clip", "clip_range": 1e-4},
    },
    # Pref-GRPO: arXiv 2508.20751 and the FLUX script of its code of 2025, train_flux_pref_grpo. Its rewards are the win
    # rate (`preference`) with weight 0.7 and CLIP's score with weight 1.4. (The code of 2026 has the weights 0.4 and
    # 0.6 and GRPO-Guard's ratio, and normalises advantages once more over the batch.)
    # 1. `preference` judges each pair in both orders, unless its both_orders is false. There each pair is judged in one
    #    order, and win rates are rounded to three decimals.
    # 2. There an optimizer step takes 4 samples of one prompt on each GPU; here it takes any samples.
    "pref_grpo": {
        **_SHARED,
        "tree": {"name": "chain", "start": "shared", "train_fraction": 0.6},
        "baseline": {**_GROUP_STD, "combine": "per_reward"},
        "objective": {"name": "clip", "clip_range": 1e-4},
    },
    # MC-GRPO: arXiv 2601.22582 and its code, which train language models. The row has its baseline on the tree of
    # flow_grpo_fast. Groups have an odd size (9 in its scripts), so that an even number is left without the pivot.
    # 1. Tree, kernel and clip range are flow_grpo_fast's, without a KL. Its code has beta 0.04 and clip range 0.2.
    # 2. Its trainer for GSM8K multiplies the advantages of a group by group size / (number of advantages that are not
    #    0). Its trainer for MATH does not, and neither does this row.
    # 3. The source does not say which of several equal rewards is the pivot; here it is the first.
    "mc_grpo": {**_FAST, "baseline": {"name": "median"}},
    # GRPO-Guard: arXiv 2510.22319, and the OCR and GenEval configs of its code (4e-6 for PickScore with HPS).
    # 1. The last step is ODE, as in flow_grpo.
    "grpo_guard": {**_SHARED, "baseline": _PLAIN_STD, "objective": {"name": "normalised_ratio", "clip_range": 2e-6}},
    # TempFlow-GRPO: arXiv 2508.04324 and its code. A group of 24 is 4 seeds of 6 branches.
    # 1. Step weights are normalised by the mean std of the trained steps; the code has the constant 2.25, for SD3.5.
    # 2. The last step is ODE and no branch leaves it; the code branches there too and does not train it.
    "tempflow": {**_TEMPFLOW, "tree": {"name": "brush", "branches": 6}},
    # Ours: tempflow with branches at the first three steps only, each finished in four steps.
    "tempflow_fast": {
        **_TEMPFLOW,
        "tree": {"name": "brush", "branches": 6, "profile": [6, 6, 6], "finish": {"steps": 4}},
    },
    # Ours: TempFlow-GRPO, but steps with a larger spread of rewards get more children, at the same total cost.
    # 1. A sibling's reward minus the mean of the other siblings is divided by one std for all steps. A std for each
    #    step would remove the differences in spread that the numbers of children follow.
    "adaptive": {
        **_TEMPFLOW,
        "tree": {"name": "adaptive", "branches": 6},
        "credit": {"name": "siblings", "within": "seed", "weights": "steps"},
        "baseline": {"name": "leave_one_out", "std": "global", "eps": 1e-4, "ddof": 0},
    },
    # BranchGRPO: arXiv 2509.06040, and the FLUX script of its code. A group is 16 leaves of 20 steps, split at 0, 3, 6, 9.
    # 1. Siblings' noise is the paper's, which keeps the marginals; the code's is 4 times as large (siblings: hot).
    # 2. The last step is ODE and not trained. The code trains a last stochastic step, but scores the clean estimate,
    #    which does not contain that step's noise.
    # 3. Width pruning (tree.prune, off here) drops whole chains, as in the paper; the code drops their second halves.
    "branch_grpo": {**_BRANCH, "tree": {"name": "branch", "factor": 2, "siblings": "correlated", "strength": 4.0}},
    # BranchGRPO-Mix: branch_grpo with MixGRPO's window, from the sources of BranchGRPO (arXiv 2509.06040).
    # 1. Siblings' noise is the paper's, which keeps the marginals; the code's is 4 times as large (siblings: hot).
    # 2. The last step is ODE and not trained. The code trains a last stochastic step, but scores the clean estimate,
    #    which does not contain that step's noise.
    # 3. Width pruning (tree.prune, off here) drops whole chains, as in the paper; the code drops their second halves.
    # 4. The window moves with the iterations. The code moves it by the sampling step instead, so that it stands still.
    "branch_grpo_mix": {
        **_BRANCH,
        "tree": {
            "name": "branch_window",
            "size": 4,
            "every": 25,
            "stride": 1,
            "siblings": "correlated",
            "strength": 4.0,
        },
    },
    # DenseGRPO: arXiv 2601.20218, without code.
    # 1. The calibration's number of rounds, samples of a round and first levels are ours; the paper gives none.
    # 2. The paper gives no clip range; Flow-GRPO's is used.
    "dense_grpo": {
        **_SHARED,
        "tree": {"name": "twigs", "length": None},
        "kernel": {**_FLOW_SDE, "calibrate": {"rounds": 10}},
        "credit": {"name": "step_gain", "compare": "step"},
        "baseline": _PLAIN_STD,
        "objective": {"name": "clip", "clip_range": 1e-4, "kl": _FLOW_KL},
    },
    # Stepwise-Flow-GRPO: arXiv 2603.28718, known from summaries only, without code.
    # 1. The kernel is cps; the paper's is ddim_sde, with an eta that we do not know.
    # 2. Log-probability, level and clip range are those of CPS's released configs.
    # 3. No KL, as in those configs; the paper has one, with a beta that we do not know. Divided by the variance, it
    #    would hold the last trained step of SD3's schedule (std 0.0085) 5e5 times as hard as the first.
    "stepwise_flow_grpo": {
        **_SHARED,
        "tree": {"name": "twigs", "length": 5},
        "kernel": {"name": "cps", "level": 0.8, "log_prob": "constant_free"},
        "credit": {"name": "step_gain", "compare": "joint"},
        "baseline": _PLAIN_STD,
        "objective": {"name": "clip", "clip_range": 1e-5},
    },
    # VGPO: arXiv 2512.12387, reconstructed from its abstract and its public reviews.
    # 1. discount and anchor are ours, since our sources do not give them.
    # 2. The weight multiplies the whole loss of an edge, including the KL; in the reviews it multiplies the advantage.
    # 3. Kernel, clip range and KL are Flow-GRPO's.
    "vgpo": {
        **_SHARED,
        "tree": {"name": "twigs", "length": 1, "root": False},
        "credit": {"name": "discounted_value", "discount": 0.9, "anchor": 0.1, "anchored_steps": 5},
        "baseline": _PLAIN_STD,
        "objective": {"name": "clip", "clip_range": 1e-4, "kl": _FLOW_KL},
    },
    # SAGE-GRPO: arXiv 2603.21872 and its code.
    # 1. beta adapts by PPO's rule, once an iteration; the code adapts it at every edge, by a rule that we do not know.
    # 2. The KL is divided by the variance; the code adds 1e-6 to the variance.
    # 3. `previous` is the KL of the Gaussians. With one update an iteration its value and gradient are 0. The code
    #    takes the mean of log_prob_old - log_prob instead, whose gradient is not 0.
    # 4. Its optimizer, Muon, is not available here.
    "sage_grpo": {
        **_SHARED,
        "tree": {"name": "chain", "last_step": "sde"},
        "kernel": {"name": "manifold", "level": 0.5},
        "baseline": _GROUP_STD,
        "objective": {
            "name": "clip",
            "clip_range": 1e-4,
            "step_weights": "equalised",
            "kl": {
                "form": "exact",
                "beta": 1e-7,
                "reference": "moving",
                "refresh": 10,
                "previous": 0.1,
                "target": 1e-5,
                "max_beta": 1e-5,
            },
        },
    },
    # CTPO: arXiv 2605.07331 and its code, which train autoregressive language models.
    # 1. A stochastic step takes the place of a token; tree and kernel are Flow-GRPO's.
    # 2. The source's bounds 0.025 (lower), 0.05 (upper) and 0.05 (dual) are for a token's log-probability. Here the
    #    lower one is Flow-GRPO's 1e-4, for averaged log-probabilities, and the others are twice that. `dual` is a
    #    multiple of the upper bound; 1 makes them equal.
    # 3. The script weighs each sequence by its ratio to the policy of the engine that sampled it, cut at 5. Here each
    #    step of an engine's rollout (run.engine) has a weight of its own.
    # 4. There a sum of log ratios is cut at 10, without gradient above; here at -20 and 20.
    "ctpo": {
        **_SHARED,
        "baseline": {"name": "group_mean", "std": "group", "eps": 1e-6, "ddof": 1},
        "objective": {"name": "prefix_ratio", "clip_range": [1e-4, 2e-4], "power": 0.5, "dual": 1.0},
    },
    # Flow-DPPO: arXiv 2606.11025, with the code and the numbers of UniRL (flowdppo.py). verl-omni's port has a window
    # of 2 and the level 1.2.
    # 1. The draw of the three steps depends on seed and iteration; there it depends on the iteration alone.
    # 2. It samples and trains without guidance; here that is model.guidance, which this row leaves as it is.
    "flow_dppo": {
        **_SHARED,
        "tree": {"name": "window", "size": 3, "move": "scattered"},
        "baseline": {"name": "group_mean", "std": "global", "eps": 1e-8, "ddof": 1, "clip": 1e9},
        "objective": {"name": "kl_mask", "limit": 1e-5},
    },
    # On-policy distillation: verl-omni's recipe for SD3.5-M and its code (run_sd35_medium_ocr_distill).
    # 1. The window lies in the first half of the steps, whatever their number; there it lies in the first 5 of 10.
    # 2. The teacher (model.teacher) is a LoRA over the student's base, or a pipeline with networks of the student's
    #    architecture; there it may be any pipeline.
    # 3. As there, the KL is exact for cps, and is the exact KL times the step size for flow_sde.
    # 4. It samples and trains without guidance; here that is model.guidance, which this row leaves as it is.
    "opd": {
        **_SHARED,
        "tree": {"name": "window", "size": 3, "move": "random"},
        "kernel": {"name": "cps", "level": 0.8},
        "baseline": {"name": "none"},
        "objective": {"name": "distill", "kl": {"form": "flow_grpo", "beta": 1.0, "reference": "teacher"}},
    },
}

_NO_HINTS: PresetRow = {"hints": {"name": "none"}}
PRESETS: dict[str, PresetRow] = {name: {**row, **_NO_HINTS} for name, row in (_ROWS | sample_presets.PRESETS).items()}

# Defaults of a row for keys outside `algorithm`, used where a config does not set them.
BESIDE = sample_presets.BESIDE
