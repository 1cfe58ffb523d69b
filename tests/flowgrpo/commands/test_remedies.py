"""What is said to help when a GPU's memory ran out is what the plan says, and never keeps a run from its end."""

import pytest
import torch

from flowgrpo import config
from flowgrpo.commands import remedies
from flowgrpo.commands.model_kinds import KINDS
from flowgrpo.commands.runs.folder_check import MAY_DIFFER
from flowgrpo.training.planning import memory_advice

pytestmark = pytest.mark.usefixtures("kept_trials")


@pytest.fixture
def on_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


def update_peak(settings):
    with KINDS["flow"].budget.budget_of(settings) as memory:
        return {phase.name: phase.total for phase in memory.phases()}["update"]


def test_the_switch_named_is_the_one_that_spares_most_by_the_plan(workplace, on_gpu, capsys):
    settings = config.load("tiny.yaml", ["train.micro_batch=4", "train.groups=4", "train.replay=always"])
    found = remedies.remedy("update", settings, ("train.micro_batch", "model.gradient_checkpointing", "model.vae"))
    peaks = {
        key: update_peak(config.load("tiny.yaml", ["train.groups=4", "train.micro_batch=4", key]))
        for key in ("train.micro_batch=2", "model.gradient_checkpointing=true", "model.vae=offload")
    }
    assert found == min(peaks, key=peaks.get)
    assert "computing which setting helps most" in capsys.readouterr().err


def test_a_run_with_a_checkpoint_is_not_told_to_change_what_it_learns(workplace, on_gpu):
    settings = config.load("tiny.yaml")
    assert remedies.remedy("update", settings, MAY_DIFFER).startswith(MAY_DIFFER)


def test_a_plan_that_fails_leaves_the_word_to_the_fixed_order(workplace, on_gpu, monkeypatch, caplog):
    def fail(settings):
        raise RuntimeError("no plan")

    monkeypatch.setattr(KINDS["flow"].budget, "budget_of", fail)
    settings = config.load("tiny.yaml", ["train.replay=always"])  # what graphs take, no plan is asked
    assert remedies.remedy("update", settings) == memory_advice.advice("update", settings)
    assert "no plan" in caplog.text


def test_the_processes_that_run_can_share_networks(workplace, on_gpu, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    settings = config.load("tiny.yaml")
    assert remedies.remedy("update", settings, ("run.sharding",)) == "run.sharding=fsdp2"
