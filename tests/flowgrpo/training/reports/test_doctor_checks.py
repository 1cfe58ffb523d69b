"""What the doctors of both kinds check alike."""

import types

import pytest
import torch

from flowgrpo.errors import InputError
from flowgrpo.training.reports import doctor_checks

GIB = 2**30


@pytest.fixture
def gpu(monkeypatch):
    """A GPU of 24 GiB, of which 12 were taken."""
    monkeypatch.setattr(doctor_checks, "peak_bytes", lambda device: 12 * GIB)
    properties = types.SimpleNamespace(total_memory=24 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return torch.device("cuda")


def test_the_planned_peak_stands_beside_the_measured_one(gpu):
    asked = []

    def planned(room):
        asked.append(room)
        return {"phases": [{"phase": "rollout", "total": 9 * GIB}, {"phase": "update", "total": 13 * GIB}]}

    check = doctor_checks.memory_left(gpu, "lower it", planned)
    assert check.value.startswith(
        "GPU 12.0 of 24.0 GiB at its peak, 13.0 planned for a run, in the phase update, host "
    )
    assert asked == [24 * GIB]
    assert check.ok


def test_a_model_that_cannot_be_planned_is_measured_all_the_same(gpu):
    def planned(room):
        raise InputError("there are no configs of it")

    check = doctor_checks.memory_left(gpu, "lower it", planned)
    assert "12.0 of 24.0 GiB at its peak, a run's peak is unknown (there are no configs of it), host" in check.value


def test_without_a_gpu_nothing_is_planned():
    assert doctor_checks.memory_left(torch.device("cpu"), "lower it", None).value.startswith("host ")
