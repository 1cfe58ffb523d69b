"""Presets that train on final samples (`likelihood: elbo`); see `presets`.

The comment above a row gives its source and its numbered departures from the source. `The study` is "Rethinking
diffusion RL" (arXiv 2602.04663). All rows share these departures, besides those of `presets`:

 1. The sampler's times reach the model unchanged. The code of DiffusionNFT and of the study rounds the times of
    rollouts to integers of 0 to 1,000.
 2. The study's code divides the log-likelihood by the guidance scale; here it is not. At scale 1 they are equal.
 3. If an iteration has several optimizer steps, each sample goes to one of them; its noise is drawn once.
"""

from __future__ import annotations

from typing import Any

from flowgrpo.schema.preset_overrides import PresetRow

_GLOBAL_STD = {"name": "group_mean", "std": "global", "eps": 1e-4, "ddof": 0}
_SHARED: PresetRow = {"tree": {"name": "chain"}, "credit": {"name": "terminal"}, "baseline": _GLOBAL_STD}
_UNCUT = {"name": "none", "clip": 1e9}  # the advantage is the reward
_RISING = {"slope": 0.001, "most": 0.5}  # the old policy's decay
_LATE = {"flat": 75, "slope": 0.0075, "most": 0.999}
_STUDY = {"name": "elbo", "weight": "adaptive", "sampler": "old", "anchor": "old", "old": _RISING}
_STRATA = {
    "name": "elbo",
    "draws": 6,
    "times": "strata",
    "steps": [1, -2],
    "weight": "power",
    "power": 0.25,
    "anchor": "live",
}
_COUPLED = {"name": "elbo", "draws": 4, "noise": "group", "weight": "velocity"}
_PREFERENCE = {"name": "elbo", "times": "logit_normal", "weight": "velocity", "sampler": "reference", "shift": 3.0}
_BY_DPM2: PresetRow = {**_SHARED, "kernel": {"name": "ode", "solver": "dpm2"}, "likelihood": _STUDY}
_BY_EULER: PresetRow = {**_SHARED, "kernel": {"name": "ode"}}
_SPLIT: PresetRow = {
    "kernel": {"name": "flow_sde", "level": 0.7},
    "credit": {"name": "nested", "group": 0.5, "siblings": 0.5, "starts": True},
    "baseline": {**_GLOBAL_STD, "name": "leave_one_out", "scale": 0.2},
}
_BY_NOISE: PresetRow = {
    **_SHARED,
    "tree": {"name": "chain", "last_step": "sde"},
    "kernel": {"name": "flow_sde", "level": 0.7},
    "likelihood": {**_PREFERENCE, "anchor": "live"},
}


def _kl(beta: float, **options: Any) -> dict[str, Any]:
    return {"form": "velocity", "beta": beta, **options}


PRESETS: dict[str, PresetRow] = {
    # EPG of the study "Rethinking diffusion RL": arXiv 2602.04663 and its code, GenEval scripts with ODE rollouts.
    # 1. Advantages are cut at 5, then multiplied by 0.1. The code has no bound; rewards of 0 to 1 never reach 5.
    "epg": {
        **_BY_DPM2,
        "baseline": {"name": "group_mean", "std": "none", "scale": 0.1},
        "objective": {"name": "gradient", "kl": _kl(1e-4)},
    },
    # PEPG of the study (arXiv 2602.04663). The study's PAR has the same gradient, because the released code detaches
    # PAR's ratio.
    # 1. Advantages are cut at 5, then multiplied by 0.1. The code has no bound; rewards of 0 to 1 never reach 5.
    "pepg": {
        **_BY_DPM2,
        "baseline": {"name": "group_mean", "std": "none", "scale": 0.1},
        "objective": {"name": "proximal", "kl": _kl(1e-4)},
    },
    # GRPO of final samples, from the code of the study (arXiv 2602.04663). No script there runs it, so its loop is not
    # known.
    "elbo_grpo": {**_BY_DPM2, "objective": {"name": "clip", "clip_range": 1e-3, "kl": _kl(1e-4)}},
    # DiffusionNFT: arXiv 2509.16117 and the default config of its code. (Its OCR config has beta 0.1 and a decay of 0
    # for 75 steps, which then rises by 0.0075 a step to 0.999. Its config for several rewards has beta 0.1.)
    "nft": {**_BY_DPM2, "objective": {"name": "two_branch", "beta": 1.0, "kl": _kl(1e-4)}},
    # Sol-RL: arXiv 2604.06916 and its code in NVlabs/Sana; we read the configs of SD3.5 and FLUX.1 in a fork. It is
    # DiffusionNFT on drafts: `train.draft` is part of the row.
    # 1. Drafts use the run's own network and Euler's method; there they use NVFP4 weights and dpm2.
    # 2. Starts whose reward was lost rank in the middle.
    # 3. Six of ten noise levels are drawn, as there for SD3.5 and SANA; for FLUX.1 it draws four.
    "sol_rl": {
        **_BY_DPM2,
        "likelihood": {**_STUDY, "draws": 6},
        "objective": {"name": "two_branch", "beta": 1.0, "kl": _kl(1e-4)},
    },
    # AWM: arXiv 2509.25050 and its code, the GenEval config.
    # 1. Rollouts use dpm2. The code uses SA-Solver with noise 0.4 on sigmas of 0.3 to 0.9, which we do not support.
    # 2. Each sample draws its own noise levels from the strata; there a micro-batch shares them.
    # 3. `previous` is a multiple of beta: 1000 x 0.001 gives the code's coefficient of 1. It pulls to an old policy
    #    of decay 0.3 at most.
    # 4. The first two epochs are trained on. The code skips them, because its sampler's groups are wrong there.
    "awm": {
        **_BY_DPM2,
        "likelihood": {**_STRATA, "old": {"slope": 0.001, "most": 0.3}},
        "baseline": {**_GLOBAL_STD, "scale": 0.2},
        "objective": {"name": "gradient", "ratio": False, "kl": _kl(0.001, previous=1000.0)},
    },
    # Ours: AWM without its two divergences, each of which needs another policy's velocity at every draw.
    # 1. Rollouts use dpm2. AWM's code uses SA-Solver with noise 0.4 on sigmas of 0.3 to 0.9, which we do not support.
    # 2. Each sample draws its own noise levels from the strata; in AWM's code a micro-batch shares them.
    "awm_fast": {
        **_BY_DPM2,
        "likelihood": _STRATA,
        "baseline": {**_GLOBAL_STD, "scale": 0.2},
        "objective": {"name": "gradient", "ratio": False},
    },
    # Ours: awm_fast on trees that split, with credit by noise level. Samples with a common start share the advantage of
    # their start above the split. Below it each is compared with the samples that it shares the state with, half and
    # half with the whole group. No source has it.
    # 1. Each sample draws its own noise levels from the strata; in AWM's code a micro-batch shares them.
    # 2. Rollouts take Euler steps, and a noisy step (flow_sde) at each split.
    "awm_split": {
        **_SPLIT,
        "tree": {"name": "branch_window", "size": 0, "siblings": "own", "splits": [2]},
        "likelihood": _STRATA,
        "objective": {"name": "gradient", "ratio": False},
    },
    # Ours: awm_split on whole branch trees, which split up to four times in the first half of the steps.
    # 1. Each sample draws its own noise levels from the strata; in AWM's code a micro-batch shares them.
    # 2. Rollouts take Euler steps, and a noisy step (flow_sde) at each split.
    "awm_tree": {
        **_SPLIT,
        "tree": {"name": "branch_window", "size": 0, "siblings": "own"},
        "likelihood": _STRATA,
        "objective": {"name": "gradient", "ratio": False},
    },
    # Ours: trees of four samples that split once, trained below the split alone, where siblings differ. A group of four is
    # one tree. For rewards that late steps decide; `flowgrpo doctor` names the step to split at.
    # 1. Each sample draws its own noise levels from the strata; in AWM's code a micro-batch shares them.
    # 2. Rollouts take Euler steps, and a noisy step (flow_sde) at each split.
    "awm_late": {
        **_SPLIT,
        "tree": {"name": "branch_window", "size": 0, "siblings": "own", "splits": [2], "factor": 4},
        "likelihood": {**_STRATA, "steps": [2, -2]},
        "objective": {"name": "gradient", "ratio": False},
    },
    # Ours: awm_split on brushes. Two branches leave the ODE trunk of each start at each of the steps 1 to 3.
    # 1. Each sample draws its own noise levels from the strata; in AWM's code a micro-batch shares them.
    # 2. Rollouts take Euler steps, and a noisy step (flow_sde) at each split. A branch is compared with what the trunk
    #    leads to, too.
    "awm_brush": {
        **_SPLIT,
        "tree": {"name": "brush", "branches": 2, "profile": [0, 2, 2, 2]},
        "likelihood": _STRATA,
        "objective": {"name": "gradient", "ratio": False},
    },
    # RAM (Reinforce Adjoint Matching): arXiv 2605.10759, known from summaries, and the port in the study's code.
    # 1. Sampler, noise levels and decay are the port's. In the paper the current policy samples, and the target is
    #    v_ref + R ((noise - x0) - v) with the current policy's v. The port and this row use the old policy's v.
    "ram": {
        **_BY_DPM2,
        "likelihood": {**_STUDY, "weight": "velocity"},
        "objective": {"name": "velocity_target", "scale": 1.0},
    },
    # RVM (reward-based velocity matching), for few-step models: FastVideo's RVMFaithfulMethod (pull request 1806), which
    # post-trains a video model of four steps, after arXiv 2608.23664, of which we know the abstract. A sample is noised
    # once, at t ~ U(0, 1), and the gradient in v is A (v - (noise - x0)), with A = 0.1 clip((R - the group's mean) / (the
    # std of all rewards of the iteration + 1e-4), -5, 5). The sampler is the deployed one: its few Euler steps, unguided.
    # Its ablation with the deployed sampler's own noise levels is likelihood.times=schedule.
    # 1. The loss is A times the squared error, whose gradient is twice the code's; Adam's steps differ by max_grad_norm.
    # 2. sigma is t. The code shifts t as the model's schedule is, by 12 for its videos: likelihood.shift=12.
    # 3. The code's optional anchor, beta (v - v_ref), is objective.kl.beta=0.001, twice as well. It is off here and there.
    # 4. The code leaves the sound of its videos out of the loss; here all of a sample is in it.
    "rvm": {
        **_BY_EULER,
        "likelihood": {"name": "elbo", "draws": 1, "times": "uniform", "weight": "velocity", "anchor": "live"},
        "baseline": {**_GLOBAL_STD, "scale": 0.1},
        "objective": {"name": "gradient", "ratio": False, "kl": _kl(0.0)},
    },
    # CRD: arXiv 2603.14128, and Flow-Factory's port.
    # 1. One old policy samples and is the anchor. The port's anchor is a second old policy, with decay 0.25 rising by
    #    0.005 to 0.999.
    # 2. The reference of the divergence has the guidance of training; there it has guidance scale 4.5.
    # 3. Steps are drawn without repeats. The port's 20 draws from 10 steps are always
    #    0 0 0 1 1 2 2 3 3 4 4 4 5 5 6 6 7 7 8 8, without the last and cleanest step.
    # 4. Log ratio and optimality are centred over all noise levels of an optimizer step. The port centres them at each
    #    level, over one micro-batch of all GPUs: 64 samples of several prompts.
    # 5. Sigmas are the pipeline's; the port's come from a linspace whose last value before 0 is 0.25.
    # 6. 1e-4 is added to the std; the port divides by max(std, 1e-6).
    "crd": {
        **_BY_EULER,
        "likelihood": {**_STUDY, "weight": "adaptive_velocity", "old": _LATE},
        "objective": {"name": "centred", "beta": 1.0, "adaptive_kl": 0.001, "kl": _kl(0.1)},
    },
    # Reward-weighted regression: train_sd3_sft of Flow-GRPO's code (arXiv 2505.05470); no released config chooses it.
    # Nothing bounds the loss of a negative reward.
    # 1. The reference, which samples, never changes; there it can be copied every few optimizer steps.
    "rwr": {**_BY_NOISE, "baseline": _UNCUT, "objective": {"name": "gradient", "ratio": False}},
    # Fine-tuning on the best of each group: train_sd3_sft of Flow-GRPO's code (arXiv 2505.05470).
    # 1. A group of equal rewards is left out; there all its samples are trained on.
    # 2. The loss is the mean over the best samples alone; there it is the mean over all samples, and the others add 0.
    # 3. The reference, which samples, never changes; there it can be copied every few optimizer steps.
    "sft_best": {**_BY_NOISE, "baseline": {"name": "best"}, "objective": {"name": "gradient", "ratio": False}},
    # Online DPO: train_sd3_dpo of Flow-GRPO's code (arXiv 2505.05470).
    # 1. The reference is copied every 40 optimizer steps, as a comment in its config says for the online form; the
    #    config itself never copies it.
    # 2. A group of equal rewards has no pair and no loss; there its first two samples are a pair.
    "dpo": {
        **_BY_NOISE,
        "likelihood": {**_PREFERENCE, "anchor": "reference", "noise": "group"},
        "objective": {"name": "pair_preference", "beta": 100.0, "kl": {"reference": "moving", "refresh": 40}},
    },
    # SePPO: arXiv 2410.05255, whose code has no training.
    # 1. The equation is reconstructed from reviews of the paper.
    # 2. The snapshot samples a group. Its best sample by reward takes the place of a data set's winner, and its worst
    #    the place of the reference's sample. With data.groups the winners are stored, and the snapshot's sample
    #    replaces the worst one of each group. The paper needs no loser.
    # 3. beta is not published. 50 is as sharp as dpo's 100, which that loss halves. It includes the paper's weight of
    #    noise levels.
    # 4. The velocity of a flow model is scored; there it is the noise prediction of Stable Diffusion 1.5.
    # 5. A pair is scored at four noise levels, each with its own sign; there it is scored at one.
    # 6. One snapshot is drawn for all groups of an iteration, first the initial policy. We do not know the paper's way.
    "seppo": {
        **_BY_EULER,
        "likelihood": {
            **_COUPLED,
            "times": "uniform",
            "sampler": "bank",
            "anchor": "bank",
            "bank": {"every": 30, "keep": 7},
        },
        "objective": {"name": "semi_policy", "beta": 50.0},
    },
    # DGPO: arXiv 2510.08425 and its code, with the config general_ocr_sd3_4gpu that its README runs. (The README gives
    # KL and clip as 1e-3.)
    # 1. The live policy samples throughout; there the old one samples after 200 optimizer steps.
    # 2. Sigmas are the pipeline's. There they are 0.9997, 0.9639, 0.9227 to 0.2498, in training rounded to 1 / 1,000.
    # 3. Each group draws its own noise levels; there all groups of an iteration share them.
    # 4. A group has one noise for each level; there each micro-batch draws its own.
    "dgpo": {
        **_BY_DPM2,
        "likelihood": {**_COUPLED, "steps": [0, -3], "anchor": "reference", "old": {"slope": 0.001, "most": 0.3}},
        "objective": {"name": "group_sigmoid", "beta": 100.0, "clip_range": 1e-2, "kl": _kl(0.02)},
    },
    # GDRO: arXiv 2601.02036, known from summaries, without code; its OCR numbers (GenEval has beta 6 and best 1).
    # 1. It trains on stored groups of the reference's samples. Here the reference samples during the run, unless
    #    data.groups names a folder.
    # 2. All samples of a group are ranked; there 6 of 16, as here with stored groups of 16 and train.group_size=6.
    # 3. A group shares its noise and four levels: our choice. By one summary the paper draws a level for each sample.
    "gdro": {
        **_BY_EULER,
        "likelihood": {**_COUPLED, "times": "uniform", "sampler": "reference", "anchor": "reference"},
        "baseline": _UNCUT,
        "objective": {"name": "plackett_luce", "beta": 12.0, "temperature": 0.05, "best": 0.5},
    },
}

# Guidance is as in the sources: off in rollouts and updates, or on in rollouts alone. For SePPO and GDRO it is unknown,
# and "on in rollouts" is our choice. ram, awm_fast and elbo_grpo follow the code that they come from.
_OURS = ("awm_fast", "awm_split", "awm_tree", "awm_late", "awm_brush")
_UNGUIDED = ("epg", "pepg", "elbo_grpo", "nft", "sol_rl", "awm", *_OURS, "ram", "rvm", "crd")
DRAFT = {"pool": 4, "call": {"num_inference_steps": 6}}
BESIDE: dict[str, dict[str, Any]] = {
    name: {"model.guidance": "none" if name in _UNGUIDED else "rollout"} for name in PRESETS
}
BESIDE["sol_rl"] |= {"train.draft": DRAFT}
