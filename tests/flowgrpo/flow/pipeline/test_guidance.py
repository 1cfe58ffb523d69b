"""Guidance is switched off as each pipeline understands it."""

import diffusers
import pytest
from replayed import ROWS, policy_of

from flowgrpo.commands.runs import train as run
from flowgrpo.errors import InputError
from flowgrpo.flow.pipeline import guidance
from flowgrpo.flow.pipeline.call_arguments import unguided


@pytest.mark.parametrize(
    ("pipeline", "embedded", "off"),
    [
        ("FluxPipeline", True, {"true_cfg_scale": 1.0}),
        ("Flux2Pipeline", True, {}),
        ("HunyuanVideoPipeline", True, {"true_cfg_scale": 1.0}),
        ("QwenImagePipeline", False, {"true_cfg_scale": 1.0}),
        ("StableDiffusion3Pipeline", False, {"guidance_scale": 1.0}),
        ("AuraFlowPipeline", False, {"guidance_scale": 1.0}),
        ("WanPipeline", False, {"guidance_scale": 1.0, "guidance_scale_2": None}),
        ("ZImagePipeline", False, {"guidance_scale": 0.0}),
        ("Krea2Pipeline", False, {"guidance_scale": 0.0}),
        (
            "LTX2Pipeline",
            False,
            {
                "guidance_scale": 1.0,
                "audio_guidance_scale": 1.0,
                "stg_scale": 0.0,
                "audio_stg_scale": 0.0,
                "modality_scale": 1.0,
                "audio_modality_scale": 1.0,
            },
        ),
    ],
)
def test_guidance_is_switched_off_as_each_pipeline_understands_it(pipeline, embedded, off):
    found = unguided(getattr(diffusers, pipeline), embedded)
    assert found.pop("negative_prompt", None) is None
    assert found == off


def test_without_guidance_one_branch_is_trained_and_two_are_evaluated(workplace):
    overrides = {"model.guidance": "none", "model.call.guidance_scale": 3.0, "train.iterations": 1}
    done = run.train("tiny.yaml", overrides)
    train = [line for line in done.metrics if line["phase"] == "train"]
    held_out = [line for line in done.metrics if line["phase"] == "eval"]
    assert [line["cost/rollout_evaluations"] for line in train] == [8 * 3]  # samples x steps
    assert [line["cost/model_evaluations"] for line in held_out] == [3 * 3 * 2] * 2
    assert [line["policy/max_abs_log_ratio"] for line in train] == [0.0]
    assert done.policy.call["guidance_scale"] == 3.0

    guided = run.train("tiny.yaml", {**overrides, "model.guidance": "pipeline", "run.name": "guided"}).metrics
    assert guided[0]["reward/mean"] == held_out[0]["reward/mean"]  # before training
    assert guided[1]["cost/rollout_evaluations"] == 8 * 3 * 2


def test_a_guidance_that_no_argument_switches_off_is_refused():
    with pytest.raises(InputError, match=r"model.guidance: StableDiffusion3Pipeline .*evaluates 2 branches"):
        guidance.check_unguided(policy_of("sd3_guided"), ROWS)
