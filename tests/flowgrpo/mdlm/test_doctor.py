"""The doctor finds a sound text run sound, and names the fault of one that was broken on purpose."""

import json
from dataclasses import replace

import pytest
import torch

from flowgrpo import config
from flowgrpo.cli import main
from flowgrpo.mdlm import doctor
from flowgrpo.mdlm.methods.presets import PRESETS

NAMES = ["drift", "gradients", "group_spread", "memory", "lora_reload"]
LORA = {"rank": 2, "alpha": 4.0}
# In a plain run: presets that the estimates of others are like.
PLAIN = [("diffu_grpo", LORA), *((preset, None) for preset in ("diffu_grpo", "gdpo", "cj_grpo", "co_grpo", "igpo"))]


@pytest.fixture
def examined(settings, tmp_path, monkeypatch, capsys):
    """The checks of a run with overrides, by name."""
    monkeypatch.chdir(tmp_path)

    def checks(**changes):
        (tmp_path / "chosen.yaml").write_text(config.dump(settings(**changes)))
        status = main(["doctor", "chosen.yaml", "--format", "json"])
        printed = json.loads(capsys.readouterr().out)
        assert printed["ok"] == (status == 0) == all(check["ok"] for check in printed["checks"])
        return {check["name"]: check for check in printed["checks"]}

    return checks


@pytest.mark.parametrize(
    ("preset", "lora"),
    [
        pytest.param(preset, lora, marks=() if (preset, lora) in PLAIN else pytest.mark.zoo)
        for preset in PRESETS
        for lora in (None, LORA)
    ],
)
def test_a_sound_run_gets_a_clean_bill(examined, preset, lora):
    tail = {"algorithm__hints__tail": 0} if preset == "igpo" else {}
    checks = examined(algorithm__preset=preset, model__lora=lora, **tail)
    assert list(checks) == NAMES
    assert all(check["ok"] and check["advice"] == "" for check in checks.values()), checks
    assert ("decoder recorded" in checks["drift"]["value"]) == (preset == "cj_grpo")  # at temperature 1


@pytest.mark.parametrize("name", [pytest.param("digits", marks=pytest.mark.zoo), None])
def test_a_model_alone_gets_a_clean_bill(model, capsys, name):
    assert main(["doctor", name or str(model), "--format", "json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [check["name"] for check in printed["checks"]] == NAMES


@pytest.fixture
def hooked(monkeypatch):
    """Puts a hook on a layer of the model that the doctor loads."""

    def hook(path, change):
        def loaded(settings, device):
            policy, weights = real(settings, device)
            layer = policy.predictor.model.get_submodule(path)
            layer.register_forward_hook(lambda _, __, out: change(out))
            return policy, weights

        real = doctor.policy_and_weights
        monkeypatch.setattr(doctor, "policy_and_weights", loaded)

    return hook


def test_a_model_that_is_random_is_named(examined, hooked):
    hooked("lm_head", lambda out: out + torch.rand(out.shape))
    checks = examined()
    assert not checks["drift"]["ok"]
    assert "changes with its batch" in checks["drift"]["advice"]


def test_a_decoder_that_records_other_numbers_is_named(examined, monkeypatch):
    real = doctor.training_decoder

    def tampered(*arguments):
        decoder = real(*arguments)

        def scorer(step, proposed):
            proposed.log_prob.sub_(0.5)
            return decoder.scorer(step, proposed)

        return replace(decoder, scorer=scorer)

    monkeypatch.setattr(doctor, "training_decoder", tampered)
    checks = examined(algorithm__preset="cj_grpo")
    assert not checks["drift"]["ok"]
    assert "5.0e-01 from what the decoder recorded" in checks["drift"]["value"]


def test_a_constant_reward_is_named(examined, tmp_path):
    (tmp_path / "flat.py").write_text("def flat(texts, prompts):\n    return [0.5] * len(texts)\n")
    checks = examined(rewards=[{"use": "./flat.py:flat"}])
    assert [name for name, check in checks.items() if not check["ok"]] == ["group_spread"]
    assert "'flat' gave every sample of a group the same value" in checks["group_spread"]["advice"]


def test_a_constant_reward_beside_one_that_differs_is_a_warning(examined, tmp_path, capsys):
    (tmp_path / "own.py").write_text(
        "def flat(texts, prompts):\n    return [0.5] * len(texts)\n"
        "def counted(texts, prompts):\n    return list(range(len(texts)))\n"
    )
    both = [{"use": "./own.py:counted"}, {"use": "./own.py:flat", "weight": 0.1}]
    checks = examined(rewards=both)
    assert checks["group_spread"]["ok"]
    assert main(["doctor", "chosen.yaml"]) == 0
    assert "\nwarn group_spread  standard deviation" in capsys.readouterr().out
    assert "'flat' gave every sample of a group the same value" in checks["group_spread"]["advice"]
    assert not examined(rewards=[{**both[0], "weight": 0}, both[1]])["group_spread"]["ok"], (
        "nothing counts that differs"
    )


def test_other_prompts_are_answered_until_a_reward_differs(examined, tmp_path):
    (tmp_path / "late.py").write_text(
        "def late(texts, prompts):\n"
        "    open('asked.txt', 'a').write(prompts[0] + ' ')\n"
        "    return [i * (prompt == 'dab') for i, prompt in enumerate(prompts)]\n"
    )
    checks = examined(rewards=[{"use": "./late.py:late"}])
    assert checks["group_spread"]["value"] == "standard deviation within 4 samples: late 1.3"  # of 0, 1, 2 and 3
    assert (tmp_path / "asked.txt").read_text().split()[-5:] == ["bcd", "c", "bcd", "bcd", "dab"]


def test_gradients_that_do_not_reach_are_named(examined, hooked):
    hooked("model.layers.0", torch.Tensor.detach)
    checks = examined(model__lora=LORA)
    assert not checks["gradients"]["ok"]
    assert "over 8 of 16 tensors" in checks["gradients"]["value"]
    assert "no gradient reaches some trained weights" in checks["gradients"]["advice"]


def test_an_export_that_loses_the_adapter_is_named(examined, monkeypatch):
    monkeypatch.setattr(doctor, "load_adapter", lambda predictor, folder: None)
    checks = examined(model__lora=LORA)
    assert [name for name, check in checks.items() if not check["ok"]] == ["lora_reload"]
    assert checks["lora_reload"]["value"].startswith("saved and reloaded weights give the logits to within ")
