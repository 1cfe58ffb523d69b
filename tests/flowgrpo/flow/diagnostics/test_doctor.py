"""The doctor finds a sound model sound, and names the fault of one that was broken on purpose."""

import itertools
import json
import re
import time
from types import SimpleNamespace

import pytest
import tiny
import torch
from zoo import SPECIMENS

from flowgrpo.cli import main
from flowgrpo.flow.diagnostics import doctor, spectrum
from flowgrpo.flow.pipeline.loading import load as loading

NAMES = ["runs", "conditioning", "times", "drift", "gradients"]
NAMES += ["group_spread", "spectrum", "time", "memory", "lora_reload"]


@pytest.fixture(autouse=True)
def a_small_spectrum(monkeypatch):
    """As few starts as it takes to compare some."""
    monkeypatch.setattr(spectrum, "EVALUATIONS", 60)


def examined(capsys, *arguments):
    status = main(["doctor", *arguments, "--format", "json"])
    printed = json.loads(capsys.readouterr().out)
    assert printed["ok"] == (status == 0) == all(check["ok"] for check in printed["checks"])
    return {check["name"]: check for check in printed["checks"]}


def evaluated(checks):
    return tuple(map(int, re.findall(r"(\d+) (?:evaluations|samples)", checks["spectrum"]["value"])))


def test_the_spectrum_takes_as_many_evaluations_as_told_or_as_its_seconds_pay_for(workplace, capsys, monkeypatch):
    assert evaluated(examined(capsys, "tiny.yaml")) == (56, 32)
    assert evaluated(examined(capsys, "tiny.yaml", "--spectrum", "600")) == (588, 336)
    monkeypatch.setattr(spectrum, "SECONDS", 20)
    monkeypatch.setattr(
        doctor, "time", SimpleNamespace(perf_counter=itertools.count().__next__)
    )  # a second of sampling
    # Two prompts of four samples in three steps pay for 68 starts.
    assert evaluated(examined(capsys, "tiny.yaml"))[0] == 20 * 2 * 4 * 3 // 14 * 14


def test_a_language_model_has_no_spectrum(capsys):
    assert main(["doctor", "digits", "--spectrum", "600"]) == 2
    assert "--spectrum: mdlm has no noisy steps to measure, leave it out" in capsys.readouterr().err


@pytest.fixture
def broken(monkeypatch):
    """Let the network of every loaded pipeline get an argument that a function has changed."""

    def breaking(name, change):
        def hook(module, args, kwargs):
            return args, {**kwargs, name: change(kwargs[name])}

        def load(path, dtype=torch.float32, given=None, quantise=None, variant=None):
            pipe = tiny.sd3().to(dtype)
            pipe.transformer.register_forward_pre_hook(hook, with_kwargs=True)
            return pipe

        monkeypatch.setattr(loading, "load_pipeline", load)
        monkeypatch.setattr(loading, "loads_later", lambda path: False)

    return breaking


def test_a_sound_model_gets_a_clean_bill(workplace, capsys):
    checks = examined(capsys, "tiny.yaml")
    assert list(checks) == NAMES
    assert all(check["ok"] and check["advice"] == "" for check in checks.values())
    assert checks["drift"]["value"].startswith("0.0e+00")
    spectrum = checks["spectrum"]["table"]
    assert [row["of"] for row in spectrum] == ["start", *(f"step {i}" for i in range(len(spectrum) - 1))]
    assert sum(row["share"] for row in spectrum) == pytest.approx(1)
    assert all(checks[name]["table"] == [] for name in NAMES if name != "spectrum")


def test_a_method_without_noise_is_examined_by_steps_that_have_some_and_a_guided_velocity_warned_of(workplace, capsys):
    guided = ["algorithm.preset=nft", "model.guidance=pipeline", "model.call.guidance_scale=4.5"]
    checks = examined(capsys, "tiny.yaml", *guided)
    assert list(checks) == ["warning", *NAMES]
    assert checks["warning"]["value"].startswith("model.guidance: pipeline fits the guided velocity to final samples")
    assert checks["drift"]["value"].startswith("0.0e+00")


def test_overrides_reach_a_config_and_a_model_alone_and_a_constant_reward_is_named(workplace, tiny_model, capsys):
    (workplace / "flat.py").write_text("def flat(images, prompts):\n    return [1.0] * len(prompts)\n")
    for target, others in (("tiny.yaml", []), (str(tiny_model), ["model.call={height: 16, width: 16}"])):
        checks = examined(capsys, target, "rewards=[./flat.py:flat]", *others, "model.call.num_inference_steps=4")
        assert checks["runs"]["value"].startswith("StableDiffusion3Pipeline, 4 steps")
        assert [name for name, check in checks.items() if not check["ok"]] == ["group_spread"]
        assert "'flat' gave every sample of a group the same value" in checks["group_spread"]["advice"]
    assert main(["doctor", "shapes", "train.group=3"]) == 2
    assert "train.group: unknown key, did you mean 'groups'" in capsys.readouterr().err


@pytest.mark.zoo
def test_the_embedded_model_gets_a_clean_bill(capsys):
    checks = examined(capsys, "shapes")
    assert list(checks) == NAMES
    assert all(check["ok"] for check in checks.values())


def test_a_schedule_that_is_long_enough_gets_advice_on_the_tree(workplace, capsys):
    checks = examined(capsys, "tiny.yaml", "model.call.num_inference_steps=9")
    assert list(checks) == [*NAMES[:-2], "tree", *NAMES[-2:]]
    assert "preset: awm_" in checks["tree"]["value"]


def test_an_edit_model_alone_is_told_what_it_lacks(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    SPECIMENS["FluxControlPipeline"].build().save_pretrained("model")
    checks = examined(capsys, "model")
    assert list(checks) == ["runs"]
    assert "give a config whose rows have the column control_image" in checks["runs"]["advice"]


def test_random_conditioning_is_named(workplace, capsys, broken):
    own = torch.Generator().manual_seed(1)
    broken("encoder_hidden_states", lambda states: states + torch.randn(states.shape, generator=own))
    checks = examined(capsys, "tiny.yaml")
    assert not checks["conditioning"]["ok"]
    assert "is random" in checks["conditioning"]["advice"]


def test_half_precision_times_are_named_and_the_shares_of_steps_shown_as_a_table(workplace, capsys, broken):
    broken("timestep", torch.Tensor.half)
    assert main(["doctor", "tiny.yaml"]) == 1
    told = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in told if not line.startswith(("ok ", "  "))] == [["FAIL", "times"]]
    assert any(line.startswith("  ") and "times or sigmas to float16" in line for line in told)
    begin = next(i for i, line in enumerate(told) if line.startswith("ok   spectrum"))
    assert told[begin + 1].split() == ["of", "share", "error"]
    assert told[begin + 2].split()[0] == "start"
    assert told[begin + 3].split()[:2] == ["step", "0"]
    assert -1 < float(told[begin + 3].split()[2]) < 2


LATE = """
calls = []
def late(images, prompts):
    calls.append(1)
    if len(calls) > 2: raise KeyError('gone')
    return images.mean((1, 2, 3))
"""


def test_a_reward_that_fails_on_real_samples_is_named_with_its_place(workplace, capsys, monkeypatch):
    impatient = SimpleNamespace(**vars(time) | {"sleep": lambda seconds: None})  # before it is asked again
    monkeypatch.setattr("flowgrpo.training.scoring.scorer.time", impatient)
    (workplace / "late.py").write_text(LATE)
    checks = examined(capsys, "tiny.yaml", "rewards=[./late.py:late]")
    assert [name for name, check in checks.items() if not check["ok"]] == ["group_spread"]
    said = "the reward 'late' failed 3 times (KeyError: 'gone' at late.py:5); its 4 samples are dropped"
    assert checks["group_spread"]["advice"] == said


def test_wrong_input_is_one_sentence(workplace, capsys):
    assert main(["doctor", "./nowhere"]) == 2
    assert "there is no folder './nowhere'" in capsys.readouterr().err
    assert main(["doctor", "tiny.yml"]) == 2
    assert "did you mean" in capsys.readouterr().err


def test_models_are_listed(capsys):
    assert main(["models", "--format", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {"class", "task", "drift", "certified", "note"} <= set(rows[0])
    assert main(["models"]) == 0
    assert "FluxPipeline" in capsys.readouterr().out
