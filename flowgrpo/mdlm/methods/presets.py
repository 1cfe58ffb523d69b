"""The presets of masked-diffusion language models: a choice for each axis of `mdlm.methods`, with its options.

To add a method, add a row. Numbers of the loop (passes, groups, learning rate) and sizes (length, steps, blocks) depend on
the model and are not part of a row. `published` has those of the released code, as overrides; `flowgrpo plan` shows them.
Rows of trees are in `tree_presets`.

The comment above each row names its source and numbers its departures from the source's code ("there"). All rows share
departures 1 and 2 of the loop (see `mdlm.trainer`), and a third: a token is drawn by one number in [0, 1) and the
cumulated probabilities, in float64; there mostly by Gumbel noise on each logit, in the model's dtype. The distribution
is the same.
"""

from __future__ import annotations

from typing import Any

from flowgrpo.mdlm.methods import tree_presets
from flowgrpo.schema.preset_overrides import PresetRow

Options = dict[str, Any]

_MEAN = {"name": "group_mean", "std": "none"}
_STD = {"name": "group_mean", "std": "group", "eps": 1e-4, "ddof": 0}
_LEAVE_ONE_OUT = {"name": "leave_one_out"}
_ONE_STEP = {"name": "one_step", "prompt_rate": 0.0}
_UNCUT = {"clip": 1e9}


def _at_temperature(name: str, temperature: float, **more: float) -> Options:
    return {"name": name, "proposal": {"temperature": temperature, **more}}


def _row(
    likelihood: Options,
    objective: Options,
    *,
    aggregation: str,
    baseline: Options,
    decoder: str | Options = "low_confidence",
    schedule: Options | None = None,
    hints: Options | None = None,
) -> PresetRow:
    return {
        "decoder": {"name": decoder} if isinstance(decoder, str) else decoder,
        "tree": {"name": "chain"},
        "schedule": schedule or {"name": "none"},
        "hints": hints or {"name": "none"},
        "likelihood": likelihood,
        "credit": {"name": "terminal"},
        "baseline": baseline,
        "objective": objective,
        "aggregation": {"name": aggregation},
    }


_ROWS: dict[str, PresetRow] = {
    # diffu-GRPO (d1): arXiv 2504.12216 and dllm-reasoning/d1. Only the common departures.
    "diffu_grpo": _row(
        {"name": "one_step", "prompt_rate": 0.15},
        {"name": "token_ratio", "clip_range": 0.5, "kl": {"form": "k3", "beta": 0.04}},
        aggregation="token_mean",
        baseline=_MEAN,
        decoder=_at_temperature("low_confidence", 0.9),
    ),
    # Ours, from diffu_grpo; one evaluation an answer.
    # 1. No masks in the prompt.
    # 2. No reference.
    # 3. Advantages over the group's standard deviation.
    # 4. Temperature 1.
    "diffu_grpo_fast": _row(
        {"name": "one_step", "prompt_rate": 0.0},
        {"name": "token_ratio", "clip_range": 0.5},
        aggregation="token_mean",
        baseline=_STD,
    ),
    # coupled-GRPO (DiffuCoder): arXiv 2506.20639 and apple/ml-diffucoder. The code's weights of the three views are kept;
    # they sum to 1.5.
    # 1. Each answer has its own mask rate; there a batch shares one.
    # 2. The reference is fixed; there, with all weights trained, it moves 0.6 of the way to the policy every 64 steps.
    # 3. Tokens behind the end are hidden in all views; there they are masked at random like the answer.
    "coupled_grpo": _row(
        {"name": "coupled"},
        {"name": "token_ratio", "clip_range": 0.5, "kl": {"form": "k3", "beta": 0.01}},
        aggregation="token_mean",
        baseline=_LEAVE_ONE_OUT,
        decoder=_at_temperature("entropy", 1.0, top_p=0.95),
    ),
    # GDPO: arXiv 2510.08554 and its recipe in NVIDIA-NeMo/RL, not compared with the authors' own code.
    # 1. Views weigh L / k; the paper's 1 / t is off by k / (t L).
    # 2. The log ratio is divided by the length, as in the recipe; the paper divides the loss instead.
    "gdpo": _row(
        {"name": "quadrature", "nodes": 3},
        {"name": "sequence_ratio", "clip_range": 0.5},
        aggregation="sequence_mean",
        baseline=_MEAN,
    ),
    # BGPO: arXiv 2510.11683 and its form in yjyddq/DARE, not compared with the authors' own code.
    # 1. No clip; DARE clips the bound at 0.2, and at 3 for bad answers.
    # 2. 1 + d as it stands; DARE's exp(log(1 + d)) is NaN for d <= -1.
    # 3. Log ratios are divided by the answer's own length; DARE's by that of the canvas.
    "bgpo": _row(
        {"name": "monte_carlo", "masks": "exact_k", "draws": 16, "stratified": True},
        {"name": "linear_bound"},
        aggregation="sequence_mean",
        baseline={"name": "group_mean", "std": "group", "eps": 1e-6, "ddof": 1},
        decoder=_at_temperature("low_confidence", 0.6),
    ),
    # ESPO: arXiv 2512.03759 and ML-GSAI/ESPO, with its numbers for GSM8K and MATH (beta is 3e-3 for Countdown, whose clip is
    # 0, and 1e-2 for Sudoku and code): the whole canvas is trained on, tokens behind the end included.
    # 1. Each answer draws its own numbers of hidden tokens; there those of a device's batch are at equal distances.
    # 2. The reference is fixed; there, with all weights trained, it moves 0.6 of the way to the policy every 64 steps.
    # 3. LoRA without dropout; there 0.05.
    "espo": _row(
        {"name": "monte_carlo", "masks": "exact_k", "draws": 2, "antithetic": True, "scope": "canvas"},
        {
            "name": "sequence_ratio",
            "clip_range": 0.2,
            "kl": {"form": "k2", "beta": 1e-3, "level": "sequence"},
        },
        aggregation="sequence_mean",
        baseline=_LEAVE_ONE_OUT,
    ),
    # CJ-GRPO: arXiv 2509.23924 and yjyddq/EOSER-ASS-RL: the whole canvas is trained on, tokens behind the end included.
    # 1. The decoder is the code's semi-autoregressive one; the paper's best is `decoder: eoser_ass`.
    "cj_grpo": _row(
        {"name": "trajectory", "scope": "canvas"},
        {"name": "token_ratio", "clip_range": 0.5, "kl": {"form": "k3", "beta": 0.04}},
        aggregation="step_mean",
        baseline=_MEAN,
    ),
    # JustGRPO: arXiv 2601.15165 and LeapLabTHU/JustGRPO.
    # 1. The loss is a mean over all answers of a step with A != 0; there over those of each of its 8 parts, and then summed,
    #    so that the gradient is about 8 times as large before it is clipped.
    "just_grpo": _row(
        {"name": "autoregressive", "scope": "canvas"},
        {"name": "token_ratio", "clip_range": 0.2},
        aggregation="fixed_length",
        baseline={"name": "group_mean", "std": "group", "eps": 1e-4, "ddof": 1},
        decoder="left_to_right",
    ),
    # IGPO: arXiv 2509.10396 and facebookresearch/igpo. All tokens of the canvas weigh alike. Hints: see
    # mdlm/methods/hints.py.
    # 1. The view shows given tokens that are not trained on; there it hides them too.
    # 2. The log ratio is a mean over the trained tokens; there over the whole canvas, untrained given tokens included.
    # 3. If more hinted answers succeed than may replace others, the first are taken; there random ones.
    "igpo": _row(
        {"name": "one_step", "prompt_rate": 0.0, "scope": "canvas"},
        {"name": "sequence_ratio", "clip_range": 0.2, "kl": {"form": "k3", "beta": 0.01}},
        aggregation="token_mean",
        baseline=_MEAN,
        decoder=_at_temperature("low_confidence", 1.2),
        hints={"name": "inpainting"},
    ),
    # SPG: arXiv 2510.09541 and facebookresearch/SPG, with its numbers for GSM8K and MATH (beta is 2 for Countdown, 1 for
    # Sudoku).
    # 1. More draws than the canvas has blocks begin a new round; there they are refused.
    "spg": _row(
        {"name": "blocks", "draws": 2},
        {"name": "sandwich", "beta": 1.5, "mix": 0.5},
        aggregation="token_mean",
        baseline=_MEAN,
        decoder=_at_temperature("low_confidence", 0.9),
    ),
    # TraceRL: arXiv 2509.06949 and Gen-Verse/dLLM-RL with its numbers for LLaDA.
    # 1. No value model.
    # 2. Groups with less than 0.2 or more than 0.8 solved answers are trained on; there dropped.
    # 3. KL is a mean over a merged step as all else; there a sum, so that its 0.01 of 8 tokens is 0.08 here.
    # 4. An optimizer step takes whole answers; there 256 merged steps, in the order in which they were decoded.
    # 5. The first end token is trained on; there none is.
    "trace_rl": _row(
        {"name": "trajectory", "shrink": 8},
        {"name": "token_ratio", "clip_range": 0.2, "kl": {"form": "k3", "beta": 0.08, "target": "old"}},
        aggregation="step_mean",
        baseline={"name": "group_mean", "std": "group", "eps": 0.0, "ddof": 0},
        decoder=_at_temperature("low_confidence", 0.8),
    ),
    # EBPO (LLaDA2.1): arXiv 2602.08676, equations 4 and 5, and its form in yjyddq/DARE with the numbers for LLaDA2-mini; its
    # own code was not at hand. The log ratio is that of the whole answer, so it is clipped in log space.
    # 1. Log ratios above 20 have no gradient; there that of a bad answer grows as exp.
    # 2. Tokens behind the end are hidden in all views; there the row ends with the answer.
    # 3. Written tokens are not edited, as in DARE; the paper's rollouts edit them.
    "ebpo": _row(
        {"name": "all_blocks", "draws": 16},
        {"name": "sequence_ratio", "clip_range": 0.2, "normalised": False},
        aggregation="sequence_mean",
        baseline={"name": "group_mean", "std": "group", "eps": 1e-6, "ddof": 1},
        decoder={**_at_temperature("block_refinement", 0.6), "eos_early_stop": True},
    ),
    # Co-GRPO: arXiv 2512.22288, reconstructed from a description without equations or code; see learned_schedule.py.
    # 1. The distribution of the schedule's actions, the clip, the baseline and the aggregation are ours.
    "co_grpo": _row(
        {"name": "trajectory"},
        {"name": "token_ratio", "clip_range": 0.2},
        aggregation="token_mean",
        baseline=_STD,
        decoder="scheduled",
        schedule={"name": "learned"},
    ),
    # SPO (single-stream): arXiv 2509.13232 and its recipe in volcengine/verl, which trains autoregressive models. The row
    # has its baseline and loss; decoder and likelihood are diffu_grpo_fast's, since a masked-diffusion model has no exact
    # probability of a token given those before it.
    # 1. A group has two answers or more, here; there one. For a prompt without earlier rewards each is compared with the
    #    others; there eight answers of the first model give a first estimate.
    # 2. Rewards are forgotten by the mean log ratio of all answers of an update (train.half_life by log_ratio); there by
    #    that of the prompt's last answer. Without that key they are forgotten by iterations.
    # 3. Prompts are drawn by prompts.pick; there in proportion to sqrt(p (1 - p)) + 0.05 of their success rate p.
    "spo": _row(
        _ONE_STEP,
        {"name": "token_ratio", "clip_range": [0.2, 0.28], "dual": 10.0},
        aggregation="token_mean",
        baseline={"name": "tracker", **_UNCUT},
    ),
    # BNPO: arXiv 2506.02864 and changyi7231/BNPO, which trains autoregressive models. The row has its baseline and loss;
    # decoder and likelihood are diffu_grpo_fast's, since a masked-diffusion model has no exact probability of a token given
    # those before it.
    # 1. The loss of an answer is the sum over its tokens divided by the length of the canvas; there the sum itself.
    "bnpo": _row(
        _ONE_STEP,
        {"name": "token_ratio", "clip_range": [0.2, 0.28], "dual": 10.0},
        aggregation="fixed_length",
        baseline={"name": "beta", "bound": None, **_UNCUT},
    ),
    # DCPO: arXiv 2509.02333 and lime-RL/DCPO, which trains autoregressive models. The row has its baseline and mean over
    # tokens; decoder and likelihood are diffu_grpo_fast's, since a masked-diffusion model has no exact probability of a
    # token given those before it.
    # 1. The clip range is that of its other runs; there the range of a token depends on its old probability.
    # 2. Rewards of earlier visits count less (train.half_life); there they all count as much.
    "dcpo": _row(
        _ONE_STEP,
        {"name": "token_ratio", "clip_range": [0.2, 0.28], "dual": 10.0},
        aggregation="sequence_mean",
        baseline={"name": "cumulative", "eps": 0.0, "ddof": 1, **_UNCUT},
    ),
    # RiskPO: arXiv 2510.00911 and RTkenny/RiskPO, which trains autoregressive models. The row has its baseline and loss;
    # decoder and likelihood are diffu_grpo_fast's, since a masked-diffusion model has no exact probability of a token given
    # those before it.
    # 1. A sample is one answer; there the answers to five prompts are one, whose advantage they share by their rewards.
    # 2. Utilities are compared within the group, then divided by their std over the iteration. There they are compared with
    #    nothing, so that the lower quantile has 0, and divided by the std of the bundle's rewards.
    # 3. The quantiles move in units of the rewards' std; there in units of the reward.
    "riskpo": _row(
        _ONE_STEP,
        {"name": "token_ratio", "clip_range": 0.2, "dual": 3.0},
        aggregation="token_mean",
        baseline={"name": "quantile", **_UNCUT},
    ),
    # DARS: arXiv 2508.13755 and yangzhch6/DARS, which trains autoregressive models; its schedule of equal treatment (for
    # the other take prompts.pick.second_stage=hardness with most: 8). The row has its baseline and loss; decoder and
    # likelihood are diffu_grpo_fast's, since a masked-diffusion model has no exact probability of a token given those
    # before it. The preset also sets prompts.pick.second_stage={form: equal, most: 4}, unless the config has one.
    # 1. No bonus for entropy; there 0.001.
    # 2. The loss is a mean over the answers with A != 0; there it is 64 times that before the gradient is clipped.
    "dars": _row(
        _ONE_STEP,
        {"name": "token_ratio", "clip_range": 0.2},
        aggregation="fixed_length",
        baseline=_MEAN,
    ),
}

# For each preset: settings outside `algorithm` that it brings along, unless the config has them.
BESIDE: dict[str, dict[str, Any]] = {"dars": {"prompts.pick.second_stage": {"form": "equal", "most": 4.0}}}

PRESETS: dict[str, PresetRow] = {**_ROWS, **tree_presets.PRESETS}
