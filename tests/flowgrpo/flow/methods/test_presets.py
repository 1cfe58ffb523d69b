"""The rows against numbers read in released code, and what the sources set around their methods."""

import json
import math
from itertools import pairwise
from pathlib import Path

import pytest

from flowgrpo.flow.methods import CHOICES
from flowgrpo.flow.methods.presets import BESIDE, PRESETS
from flowgrpo.flow.methods.published import AROUND, NOT_SAID, OF_TEXTS, PUBLISHED
from flowgrpo.schema.preset_overrides import build_axes

SAMPLES, RELEASED = (
    json.loads((Path(__file__).parents[3] / "data" / f"released_{kind}_configs.json").read_text())
    for kind in ("sample", "flow")
)
EMA = ("decay", "interval", "warmup")


def row(preset):
    return build_axes({"preset": preset}, PRESETS, CHOICES, "flow_grpo")


def test_every_row_has_its_published_loop():
    assert PUBLISHED.keys() == PRESETS.keys()


@pytest.mark.parametrize("preset", RELEASED)
def test_a_row_has_the_numbers_of_the_released_config(preset):
    released, built, loop = RELEASED[preset], row(preset), PUBLISHED[preset]
    kernel, baseline, objective = built["kernel"], built["baseline"], built["objective"]
    assert (kernel.name, kernel.level) == (released["sde_type"], released["noise_level"])
    assert kernel.log_prob == ("constant_free" if released["sde_type"] == "cps" else "mean")
    assert (getattr(objective, "clip_range", None), objective.kl.beta) == (released.get("clip_range"), released["beta"])
    assert (objective.kl.target, objective.kl.max_beta) == (released.get("target"), released.get("max_beta"))
    spread = (getattr(baseline, "std", None), getattr(baseline, "min_std", 0.0))
    assert spread == (released["std"], released.get("min_std", 0.0))
    assert getattr(built["tree"], "size", None) == released.get("sde_window_size")
    assert loop.get("model.call.guidance_scale") == released["guidance_scale"]
    assert loop["model.guidance"] == ("pipeline" if released["guidance_scale"] else "none")
    check_loop(loop, released)


def check_loop(loop, released):
    """The sizes, the rate and the average of a recorded config; its warm-up is the code's."""
    assert loop["model.call.num_inference_steps"] == released["num_steps"]
    assert (loop["train.groups"], loop["train.group_size"]) == (released["groups"], released["num_image_per_prompt"])
    rate = loop.get("train.learning_rate")
    assert (loop["train.updates"], rate) == (released["updates"], released.get("learning_rate"))
    average = {word: released.get(f"ema_{key}") for word, key in zip(("decay", "every", "warmup"), EMA, strict=True)}
    assert loop["train.ema"] == (average if "ema_decay" in released else None)


@pytest.mark.parametrize("preset", SAMPLES)
def test_a_row_of_final_samples_has_the_loop_of_the_released_config(preset):
    released, loop = SAMPLES[preset], PUBLISHED[preset]
    check_loop(loop, released)
    assert loop["model.guidance"] == BESIDE[preset]["model.guidance"] == released["guidance"]
    assert loop.get("model.call.guidance_scale") == released.get("scale")
    assert loop["train.max_grad_norm"] == released["max_grad_norm"]
    assert row(preset)["objective"].kl.beta == released["beta"]


def test_the_clip_of_grpo_guard_binds_no_later_than_flow_grpo_s():
    """Its exponent is std times the plain one: a clip c stops it where c / std stops that. SD3's table, level 0.7."""
    sigmas = (1, 0.9601, 0.9133, 0.8577, 0.7904, 0.7073, 0.6022, 0.4649, 0.2780, 0.0089)
    stds = [0.7 * math.sqrt((a - b) * a / (1 - min(a, sigmas[1]))) for a, b in pairwise(sigmas)]
    assert stds == pytest.approx([0.700, 0.743, 0.536, 0.446, 0.392, 0.353, 0.319, 0.282, 0.225], abs=1e-3)
    guard, plain = (row(preset)["objective"].clip_range for preset in ("grpo_guard", "flow_grpo"))
    assert all(guard / std < plain for std in stds)


@pytest.mark.parametrize("preset", ["rwr", "sft_best", "dpo"])
def test_flow_grpo_s_scripts_of_preferences_roll_out_by_noise_at_every_step(preset):
    built = row(preset)
    assert (built["kernel"].name, built["kernel"].level, built["tree"].last_step) == ("flow_sde", 0.7, "sde")
    likelihood = built["likelihood"]
    assert (likelihood.times, likelihood.shift, likelihood.draws) == ("logit_normal", 3.0, None)  # 39 of 40 steps
    assert likelihood.noise == ("group" if preset == "dpo" else "fresh")
    assert likelihood.sampler == "reference"


def test_dgpo_and_flow_dppo_have_the_numbers_of_their_code():
    built = row("dgpo")
    assert (built["kernel"].solver, built["likelihood"].draws, built["likelihood"].steps) == ("dpm2", 4, [0, -3])
    assert (built["baseline"].std, built["baseline"].ddof) == ("global", 0)
    objective = built["objective"]
    assert (objective.beta, objective.clip_range, objective.kl.beta) == (100.0, 1e-2, 0.02)
    built = row("flow_dppo")
    assert (built["tree"].move, built["tree"].size, built["tree"].steps) == ("scattered", 3, None)
    baseline = built["baseline"]
    assert (baseline.std, baseline.ddof, baseline.eps, baseline.clip) == ("global", 1, 1e-8, 1e9)


def test_sol_rl_is_diffusion_nft_on_drafts():
    sol, nft = PRESETS["sol_rl"], PRESETS["nft"]
    assert {**sol, "likelihood": {**sol["likelihood"], "draws": 6}} == sol
    assert {**nft, "likelihood": {**nft["likelihood"], "draws": 6}} == sol
    assert BESIDE["sol_rl"]["train.draft"] == PUBLISHED["sol_rl"]["train.draft"]


OURS = {"flow_grpo_window", "tempflow_fast", "adaptive", "awm_fast", "awm_split", "awm_tree", "awm_late", "awm_brush"}


@pytest.mark.parametrize("preset", PRESETS)
def test_each_source_says_what_is_around_its_method_or_it_is_said_that_it_does_not(preset):
    if preset in OURS:
        assert not PUBLISHED[preset]
        return
    asked = set(AROUND) - ({"model.guidance", "model.call.num_inference_steps"} if preset in OF_TEXTS else set())
    assert asked - PUBLISHED[preset].keys() == set(NOT_SAID.get(preset, ()))


def test_a_source_s_guidance_is_what_its_row_sets():
    stated = {preset: PUBLISHED[preset].get("model.guidance") for preset in BESIDE}
    assert {preset for preset, guidance in stated.items() if guidance is None} == {
        "awm_fast",
        "awm_split",
        "awm_tree",
        "awm_late",
        "awm_brush",
        "seppo",
        "gdro",
    }
    assert all(guidance in (None, BESIDE[preset]["model.guidance"]) for preset, guidance in stated.items())
