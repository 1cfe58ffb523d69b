import pytest
import torch

from flowgrpo import config
from flowgrpo.mdlm import setup
from flowgrpo.mdlm.models.memory_estimate import memory_estimate

SETTINGS = {"kind": "mdlm", "model": {"path": "digits"}, "rewards": ["solved"]}


@pytest.mark.parametrize(("sharding", "device"), [("none", "meta"), ("fsdp2", "cpu")])
def test_a_model_that_processes_share_waits_in_host_memory_until_it_is_cut(monkeypatch, sharding, device):
    monkeypatch.setattr(setup.sharding, "applies", lambda form: form == "fsdp2")
    asked = []

    def load(model, where):
        asked.append(where.type)
        raise InterruptedError

    monkeypatch.setattr(setup, "load_text_policy", load)
    chosen = config.validate(SETTINGS | {"run": {"sharding": sharding}})
    with pytest.raises(InterruptedError):
        setup.policy_and_weights(chosen, torch.device("meta"))
    assert asked == [device]


def test_no_device_needs_room_for_a_model_that_is_shared():
    chosen = config.validate(SETTINGS)
    alone, shared = (memory_estimate(chosen, among=count) for count in (1, 4))
    assert alone["host_bytes"] == 0
    assert alone["gpu_bytes"] > shared["host_bytes"] > 0
    frozen = shared["host_bytes"]
    assert shared["gpu_bytes"] == pytest.approx(alone["gpu_bytes"] - frozen * 3 / 4, abs=4)
