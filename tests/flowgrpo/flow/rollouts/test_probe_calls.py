"""A run of a pipeline finds its batches, and what is planned and examined before it does."""

import json

import pytest
import torch
from diffusers import SD3Transformer2DModel
from in_batches import SAID, counting
from runs import metrics, weights

from flowgrpo.cli import main
from flowgrpo.flow.diagnostics import spectrum
from flowgrpo.training.fitting import batch_probing

NO_EVAL = "eval={every: 9, prompts: 1, save: 0}"  # but of one sample, at the start and at the end
AUTO = ["train.micro_batch=auto", "train.rollout_batch=auto"]


@pytest.fixture
def short(monkeypatch):
    """The most rows that the transformer takes with a gradient; each call takes a second."""
    most, real = [1000], SD3Transformer2DModel.forward

    def forward(self, hidden_states, *arguments, **options):
        if torch.is_grad_enabled() and len(hidden_states) > most[0]:
            raise torch.OutOfMemoryError(SAID)
        return real(self, hidden_states, *arguments, **options)

    monkeypatch.setattr(SD3Transformer2DModel, "forward", forward)
    monkeypatch.setattr(batch_probing, "clock", counting())
    return most


def numbers(run):
    lines = [*metrics(run), metrics(run, "eval")[-1]]
    told = [{k: v for k, v in line.items() if not k.startswith(("time/", "memory/"))} for line in lines]
    return told, weights(run, 2)


def test_a_run_of_a_pipeline_has_the_numbers_of_one_with_the_found_sizes_written_out(workplace, short, capsys):
    """Also once it goes on, where more rows would fit."""
    run = workplace / "runs"
    for most, goes_on in ((2, "train.iterations=1"), (1000, "run.resume=true")):
        short[0] = most
        assert main(["train", "tiny.yaml", *AUTO, "train.updates=1", NO_EVAL, goes_on]) == 0
        assert "found train.micro_batch 2, train.rollout_batch 8 in" in capsys.readouterr().err or most > 2
        assert "micro_batch: auto" in (run / "t" / "config.yaml").read_text()
        (held,) = json.loads((run / "t" / "batches.json").read_text())["held"]
        assert (held["micro_batch"], held["rollout_batch"]) == (2, 8)
    written = ["train.micro_batch=2", "train.rollout_batch=8", "train.updates=1", NO_EVAL]
    assert main(["train", "tiny.yaml", *written, "run.name=other"]) == 0
    (lines, found), (others, other) = numbers(run / "t"), numbers(run / "other")
    assert lines == others
    assert all(torch.equal(tensor, other[name]) for name, tensor in found.items())


def planned(capsys, *options):
    assert main(["plan", "tiny.yaml", *options, "--format", "json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_plan_counts_with_the_most_that_is_tried(workplace, capsys):
    """2 groups of 4 in 2 parts are 4 samples a part."""
    auto, written = planned(capsys, *AUTO), planned(capsys, "train.micro_batch=4", "train.rollout_batch=4")
    assert auto["geometry"].pop("found") == ["micro_batch", "rollout_batch"]
    assert written["geometry"].pop("found") == []
    assert auto["config"]["train"]["micro_batch"] == "auto"
    assert (auto.pop("graphs"), written.pop("graphs")) == (0, 8)  # what is found one by one may differ
    assert auto | {"config": None} == written | {"config": None}
    assert main(["plan", "tiny.yaml", *AUTO]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "the run finds train.micro_batch and train.rollout_batch at its start; the plan counts 4, the most that" in said
    )
    assert main(["plan", "tiny.yaml", "train.micro_batch=aut"]) == 2
    said = "train.micro_batch: 'aut' is neither a whole number from 1 to 1,048,576 nor auto, take auto"
    assert said in capsys.readouterr().err


@pytest.mark.usefixtures("kept_trials")
def test_with_a_gpu_a_plan_counts_with_the_most_that_fits(workplace, capsys):
    small = planned(capsys, *AUTO, "--gpu-memory", "1.06")["gpu"]
    assert small["found"].keys() == {"train.micro_batch", "train.rollout_batch"}
    large = planned(capsys, *AUTO, "--gpu-memory", "24")["gpu"]
    assert large["found"] == {"train.micro_batch": 4, "train.rollout_batch": 4}
    assert {each["phase"]: each["rows"] for each in large["phases"]}["update"] == 4
    assert large["fits"]
    assert large["set"] == {}
    assert main(["plan", "tiny.yaml", *AUTO, "--gpu-memory", "24"]) == 0
    said = "found when the run starts; counted here with the most that fits: train.micro_batch=4"
    assert said in capsys.readouterr().out


def test_seconds_are_those_of_the_most_that_fits(workplace, capsys):
    options = ["--gpus", "2", "--fixed-seconds", "5"]
    auto = planned(capsys, *AUTO, *options)["cost"]
    written = planned(capsys, "train.micro_batch=2", "train.rollout_batch=2", *options)["cost"]
    assert auto.pop("found") == {"train.micro_batch": 2, "train.rollout_batch": 2}  # a process has 2 samples of a part
    assert written.pop("found") == {}
    assert auto["costs"] == written["costs"]


def test_the_doctor_examines_a_run_that_has_not_found_its_batches(workplace, capsys, monkeypatch):
    monkeypatch.setattr(spectrum, "EVALUATIONS", 60)
    assert main(["doctor", "tiny.yaml", *AUTO, "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"]


def test_an_evaluation_or_a_draft_that_asks_for_more_has_to_fit_too(workplace, monkeypatch, capsys):
    """Guided calls have two branches in one, so that four rows are the most of eight."""
    real = SD3Transformer2DModel.forward

    def forward(self, hidden_states, *arguments, **options):
        if len(hidden_states) > 8:
            raise torch.OutOfMemoryError(SAID)
        return real(self, hidden_states, *arguments, **options)

    monkeypatch.setattr(SD3Transformer2DModel, "forward", forward)
    monkeypatch.setattr(batch_probing, "clock", counting())
    draft = "train.draft={pool: 2, call: {guidance_scale: 3.0}}"
    for name, asked in (("guided", "eval.call={guidance_scale: 3.0}"), ("draft", draft)):
        options = [*AUTO, asked, "train.groups=1", "train.group_size=8", "train.iterations=1", "train.updates=1"]
        options += ["eval.save=0", f"run.name={name}"]
        assert main(["train", "tiny.yaml", *options]) == 0
        (held,) = json.loads((workplace / "runs" / name / "batches.json").read_text())["held"]
        assert held["rollout_batch"] == 4
