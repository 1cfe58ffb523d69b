"""`flowgrpo plan CONFIG --gpu-memory GIB` on flow models."""

import json

import pytest

from flowgrpo import config
from flowgrpo.cli import main
from flowgrpo.flow.budget import FlowBudget
from flowgrpo.flow.trial import Trial
from flowgrpo.training.budget import GIB

TRIAL = Trial(
    components={"transformer": 10 * GIB, "text_encoder": 9 * GIB, "vae": GIB},
    shapes={"transformer": {"blocks.0.up.weight": (1024, 1024), "head.weight": (1024, 1024)}},
    width=2,
    trained=GIB // 8,
    state=GIB // 1024,
    encode=GIB // 4,
    rollout=GIB,
    decode=3 * GIB,
    decode_tiled=GIB,
    update=8 * GIB,
    update_checkpointed=2 * GIB,
)


def budget(**changes):
    written = {"model": {"path": "shapes"}, "train": {"micro_batch": 2}}
    for key, value in changes.items():
        section, _, name = key.partition("__")
        written.setdefault(section, {})[name] = value
    return FlowBudget(config.validated(written), TRIAL, 1024)


def phases(**changes):
    return {phase.name: phase for phase in budget(**changes).phases()}


def test_encoders_and_the_network_are_never_on_the_device_together():
    found = phases()
    assert found["encode"].parts["weights"] == 10 * GIB
    assert found["rollout"].parts["weights"] == 11 * GIB
    assert phases(model__text_encoders="keep")["update"].parts["weights"] == 20 * GIB


def test_each_part_is_counted():
    parts = phases(algorithm__objective={"kl": {"beta": 0}})["update"].parts
    assert parts["trained"] == GIB  # adapters and their average, of 4 bytes a number
    assert parts["optimizer"] == GIB
    assert parts["gradients"] == GIB // 2
    assert parts["states"] == GIB
    assert parts["activations"] == 2 * 8 * GIB
    assert phases(train__ema=None)["update"].parts["trained"] == GIB // 2


def test_a_moving_reference_and_full_fine_tuning_are_copies():
    kl = {"beta": 0.04, "reference": "moving"}
    assert phases(algorithm__objective={"kl": kl})["update"].parts["trained"] == 3 * GIB // 2
    parts = phases(model__lora=None, algorithm__objective={"kl": {"beta": 0.04}})["update"].parts
    assert parts["trained"] == 3 * GIB // 2
    assert parts["weights"] == GIB  # the decoder's: what is trained is no frozen weight


def test_switches_spare_what_they_are_for():
    assert phases(model__vae="offload")["update"].parts["weights"] == 10 * GIB
    assert phases(model__vae="offload")["decode"].parts["weights"] == 11 * GIB
    assert phases(model__vae_tiling=True)["decode"].parts["activations"] == 2 * GIB
    assert phases(model__gradient_checkpointing=True)["update"].parts["activations"] == 4 * GIB
    quantised = phases(model__quantise="int8")["update"].parts
    assert (
        quantised["weights"] == 11 * GIB - 1024 * 1024 + 1024 * 2
    )  # a byte less for each weight of the block, its scales
    assert quantised["activations"] == 16 * GIB + 2 * 1024 * 1024  # the layer that is made anew


def test_only_switches_that_are_not_set_are_offered():
    assert ("model.text_encoders", "offload") not in budget().switches()
    assert ("model.text_encoders", "offload") in budget(model__text_encoders="keep").switches()
    assert not [key for key, _ in budget(model__lora=None).switches() if key == "model.quantise"]
    assert not [key for key, _ in budget(model__quantise="nf4").switches() if key == "model.quantise"]


def test_plan_says_whether_a_run_fits_and_what_to_set(workplace, capsys):
    assert main(["plan", "tiny.yaml", "--gpu-memory", "2", "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)["gpu"]
    assert found["fits"]
    assert [phase["phase"] for phase in found["phases"]] == ["encode", "rollout", "decode", "update"]
    assert found["phases"][3]["rows"] == 3
    assert found["rewards_not_counted"] == ["./mine.py:redness"]
    many = found["largest"]["train.micro_batch"] + 1
    assert main(["plan", "tiny.yaml", f"train.micro_batch={many}", "--gpu-memory", "2"]) == 0
    said = capsys.readouterr().out
    assert f"does not fit 2.0 GiB as it is; it does, with 2.0, by: train.micro_batch={many - 1}" in said
    assert "not counted: the weights of ./mine.py:redness" in said


def test_plan_without_a_hub_takes_the_configs_that_are_known_here(monkeypatch, capsys):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(["plan", "flux1-24gb", "--format", "json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["memory"] is None
    assert planned["config"]["model"]["path"] == "black-forest-labs/FLUX.1-dev"
    assert main(["plan", "flux1-24gb", "model.path=owner/unknown"]) == 2
    assert "owner/unknown" in capsys.readouterr().err


@pytest.mark.parametrize("size", ["0", "-3", "much"])
def test_a_size_that_is_none_is_refused(size, capsys):
    assert main(["plan", "flux1-24gb", "--gpu-memory", size]) == 2
    assert "--gpu-memory" in capsys.readouterr().err
