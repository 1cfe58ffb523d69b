"""Presets that train on final samples (`likelihood: elbo`); see `presets`.

Above each row stand its source and its numbered departures from it. All rows also share these, beside those of `presets`:

 1. The sampler's times reach the model unchanged; the released code of DiffusionNFT and of the study of likelihoods
    rounds those of rollouts to integers of 1,000.
 2. The study's code divides the log-likelihood by the guidance scale; here it is not divided, which is the same at scale 1.
 3. If an iteration has several optimizer steps, samples are dealt to them; noise is drawn once for each sample.
"""

from __future__ import annotations

from typing import Any

from flowgrpo.schema.choose import PresetRow

_GLOBAL_STD = {"name": "group_mean", "std": "global", "eps": 1e-4, "ddof": 0}
_SHARED: PresetRow = {"tree": {"name": "chain"}, "credit": {"name": "terminal"}, "baseline": _GLOBAL_STD}
_UNCUT = {"name": "none", "clip": 1e9}  # rewards themselves
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
    # 1. Advantages are cut at 5 before they are multiplied by 0.1; the code has no bound, and rewards of 0 to 1 do not
    #    reach it.
    "epg": {
        **_BY_DPM2,
        "baseline": {"name": "group_mean", "std": "none", "scale": 0.1},
        "objective": {"name": "gradient", "kl": _kl(1e-4)},
    },
    # PEPG of the same study. Its PAR has the same gradient, since the released code detaches the ratio there.
    # 1. as in epg.
    "pepg": {
        **_BY_DPM2,
        "baseline": {"name": "group_mean", "std": "none", "scale": 0.1},
        "objective": {"name": "proximal", "kl": _kl(1e-4)},
    },
    # GRPO of final samples, of the same study, whose code has it and no script that runs it: its loop is not said.
    "elbo_grpo": {**_BY_DPM2, "objective": {"name": "clip", "clip_range": 1e-3, "kl": _kl(1e-4)}},
    # DiffusionNFT: arXiv 2509.16117 and its code, the default config (OCR has beta 0.1 and the decay 0 for 75 steps, then
    # rising by 0.0075 to 0.999; several rewards have beta 0.1).
    "nft": {**_BY_DPM2, "objective": {"name": "two_branch", "beta": 1.0, "kl": _kl(1e-4)}},
    # Sol-RL: arXiv 2604.06916 and its code in NVlabs/Sana; the configs of SD3.5 and FLUX.1 were read in a fork. DiffusionNFT
    # on drafts: `train.draft` is part of the row.
    # 1. The draft is by the run's own network, by Euler's method; there in NVFP4 and by dpm2.
    # 2. Starts whose reward was lost rank in the middle.
    # 3. Six of ten noise levels are drawn, as for SD3.5 and SANA; for FLUX.1 four.
    "sol_rl": {
        **_BY_DPM2,
        "likelihood": {**_STUDY, "draws": 6},
        "objective": {"name": "two_branch", "beta": 1.0, "kl": _kl(1e-4)},
    },
    # AWM: arXiv 2509.25050 and its code, the GenEval config.
    # 1. Rollouts are by dpm2; the code has SA-Solver, whose noise (0.4 on sigmas of 0.3 to 0.9) diffusers cannot walk here.
    # 2. Each sample draws its strata; there a micro-batch shares them.
    # 3. `previous` is in multiples of beta: 1 in all, towards the policy that follows with decay 0.3 at most.
    # 4. Its first two epochs are trained on; the code leaves them out, for its sampler's groups are wrong there.
    "awm": {
        **_BY_DPM2,
        "likelihood": {**_STRATA, "old": {"slope": 0.001, "most": 0.3}},
        "baseline": {**_GLOBAL_STD, "scale": 0.2},
        "objective": {"name": "gradient", "ratio": False, "kl": _kl(0.001, previous=1000.0)},
    },
    # Ours: AWM without its two pulls, which ask two further policies about each draw.
    # 1. as 1. and 2. of awm.
    "awm_fast": {
        **_BY_DPM2,
        "likelihood": _STRATA,
        "baseline": {**_GLOBAL_STD, "scale": 0.2},
        "objective": {"name": "gradient", "ratio": False},
    },
    # RAM (Reinforce Adjoint Matching): arXiv 2605.10759 by accounts of it, and the port in the study's code.
    # 1. Sampler, noise levels and decay are the port's. In the paper the current policy samples, and the target is
    #    v_ref + R ((noise - x0) - v) with the current policy's v; the port's, and ours, has the old policy's.
    "ram": {
        **_BY_DPM2,
        "likelihood": {**_STUDY, "weight": "velocity"},
        "objective": {"name": "velocity_target", "scale": 1.0},
    },
    # CRD: arXiv 2603.14128, and Flow-Factory's port.
    # 1. One old policy samples and anchors; the port has a second for the anchor, of decay 0.25 rising by 0.005 to 0.999.
    # 2. The reference of the divergence is guided as training is; there by a scale of 4.5.
    # 3. Steps are drawn without repeats; the port's 20 of 10 are always 0 0 0 1 1 2 2 3 3 4 4 4 5 5 6 6 7 7 8 8,
    #    of which the last step, the cleanest, is none.
    # 4. Log ratio and optimality are centred over all levels of an optimizer step; the port centres them at each level over
    #    one micro-batch of all GPUs, 64 samples of several prompts.
    # 5. The port walks sigmas that end at 0.25 before 0, by linspace; here they are the pipeline's own.
    # 6. The port divides by the std or by 1e-6, whichever is larger; here 1e-4 is added.
    "crd": {
        **_BY_EULER,
        "likelihood": {**_STUDY, "weight": "adaptive_velocity", "old": _LATE},
        "objective": {"name": "centred", "beta": 1.0, "adaptive_kl": 0.001, "kl": _kl(0.1)},
    },
    # Reward-weighted regression: train_sd3_sft of Flow-GRPO's code, where no released config chooses it. Nothing bounds the
    # push away of a negative reward.
    # 1. The reference that samples stays; there it can be copied every few optimizer steps.
    "rwr": {**_BY_NOISE, "baseline": _UNCUT, "objective": {"name": "gradient", "ratio": False}},
    # Fine-tuning on the best of each group: the same script.
    # 1. A group of equal rewards is left out; there all of it is trained on.
    # 2. The mean of the loss is over the best alone; there over all samples, of which the others add 0.
    # 3. as 1. of rwr.
    "sft_best": {**_BY_NOISE, "baseline": {"name": "best"}, "objective": {"name": "gradient", "ratio": False}},
    # Online DPO: train_sd3_dpo of Flow-GRPO's code.
    # 1. The reference is copied every 40 optimizer steps, as a comment of its config has it for the online form; the config
    #    itself copies it never.
    # 2. A group of equal rewards teaches nothing; there its first two samples are a pair.
    "dpo": {
        **_BY_NOISE,
        "likelihood": {**_PREFERENCE, "anchor": "reference", "noise": "group"},
        "objective": {"name": "pair_preference", "beta": 100.0, "kl": {"reference": "moving", "refresh": 40}},
    },
    # SePPO: arXiv 2410.05255, whose code has no training.
    # 1. The equation is put together from reviews of the paper; its own text was not at hand.
    # 2. The best of the snapshot's own group, by its rewards, stands for a winner of a data set, and the worst for the
    #    sample beside it. With data.groups winners are stored, and the snapshot's sample takes the place of the worst one
    #    of each group; the paper needs no such loser.
    # 3. beta is not published. 50 is as sharp as dpo, whose 100 is halved; the paper's weight of noise levels is in it.
    # 4. The velocity of a flow model is scored; there the noise of Stable Diffusion 1.5.
    # 5. A pair is scored at four noise levels, each with a sign of its own; there at one.
    # 6. An iteration draws one snapshot, for all its groups, and the start is the first of them; what the paper does is not
    #    known.
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
    # DGPO: arXiv 2510.08425 and its code, of which general_ocr_sd3_4gpu is the config that its README starts
    # (and for which it prints KL and clip as 1e-3).
    # 1. The live policy samples throughout; there the old one does after 200 optimizer steps.
    # 2. Sigmas are the pipeline's; there 0.9997, 0.9639, 0.9227 to 0.2498, which training rounds to whole thousandths.
    # 3. A group's noise levels are its own; there they are those of all, drawn once an iteration.
    # 4. A group's noise is one for each level; there it is drawn again for each micro-batch.
    "dgpo": {
        **_BY_DPM2,
        "likelihood": {**_COUPLED, "steps": [0, -3], "anchor": "reference", "old": {"slope": 0.001, "most": 0.3}},
        "objective": {"name": "group_sigmoid", "beta": 100.0, "clip_range": 1e-2, "kl": _kl(0.02)},
    },
    # GDRO: arXiv 2601.02036 by accounts of it, without code; the OCR numbers (GenEval has beta 6 and best 1).
    # 1. It trains on stored groups of the reference's samples; here the reference samples as the run goes, unless
    #    data.groups names a folder.
    # 2. All samples of a group are ranked; there 6 of 16, as train.group_size=6 draws them of stored groups of 16.
    # 3. Noise and noise levels are shared in a group, and four are drawn: our choice. By one account the paper draws a level
    #    for each sample.
    "gdro": {
        **_BY_EULER,
        "likelihood": {**_COUPLED, "times": "uniform", "sampler": "reference", "anchor": "reference"},
        "baseline": _UNCUT,
        "objective": {"name": "plackett_luce", "beta": 12.0, "temperature": 0.05, "best": 0.5},
    },
}

# Guidance as in the sources: off in rollouts and updates, or on in rollouts alone. Those of SePPO and GDRO are unknown; "on
# in rollouts" is our choice. RAM, AWM's fast form and GRPO of final samples follow the code that they come from.
_UNGUIDED = ("epg", "pepg", "elbo_grpo", "nft", "sol_rl", "awm", "awm_fast", "ram", "crd")
DRAFT = {"pool": 4, "call": {"num_inference_steps": 6}}
BESIDE: dict[str, dict[str, Any]] = {
    name: {"model.guidance": "none" if name in _UNGUIDED else "rollout"} for name in PRESETS
}
BESIDE["sol_rl"] |= {"train.draft": DRAFT}
