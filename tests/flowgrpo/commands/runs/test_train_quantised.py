"""A run of a flow model on a quantised base: drift, resume, doctor, plan, and an export that makes the run's pictures."""

import json
from pathlib import Path

import pytest
import tiny
import torch
from in_turn import after_first_step
from read_card import blocks
from safetensors.torch import load_file

from flowgrpo.cli import main
from flowgrpo.data.prompts import Row
from flowgrpo.flow.outputs.export import write_weights
from flowgrpo.flow.pipeline.loading.load import load_policy
from flowgrpo.training.weights.trained_weights import Weights, lora_config

SMALL = ["model.quantise=int8", "eval.every=9", "eval.prompts=1", "eval.save=0", "train.updates=1"]


def trained(name, *options):
    assert main(["train", "tiny.yaml", f"run.name={name}", *SMALL, *options]) == 0
    return load_file(Path("runs") / name / "checkpoints/step-000002/weights.safetensors")


def test_two_iterations_are_one_and_a_resume_and_one_and_the_card_makes_their_picture(workplace, refused, monkeypatch):
    whole = trained("whole")
    after_first_step(Path("runs"), "whole", "parts")
    parts = trained("parts", "run.resume=true")
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    lines = [json.loads(line) for line in Path("runs/whole/metrics.jsonl").read_text().splitlines()]
    assert [line["policy/max_abs_log_ratio"] for line in lines if line["phase"] == "train"] == [0.0] * 2
    said = refused("train", "tiny.yaml", "run.name=parts", *SMALL, "run.resume=true", "model.quantise=nf4")
    assert "model.quantise was 'int8' in runs/parts and is 'nf4' now" in said
    assert main(["export", "runs/whole", "--out", "out"]) == 0
    card = Path("out/README.md").read_text()
    assert "The base was kept in int8" in card
    assert "--quantise int8" in blocks(card)["sh"]
    monkeypatch.chdir("out")
    names = {}
    exec(blocks(card)["python"], names)
    names["image"].save("again.png")
    assert Path("again.png").read_bytes() == Path("sample-0.png").read_bytes()


def test_doctor_knows_it(workplace, printed):
    told = printed("doctor", "tiny.yaml", "model.quantise=int8", "--format", "json")
    assert {check["name"]: check for check in told["checks"]}["lora_reload"]["ok"]


@pytest.mark.zoo
@pytest.mark.usefixtures("few_objects")
def test_plan_knows_it(workplace, printed):
    whole, int8, nf4 = (
        printed("plan", "tiny.yaml", f"model.quantise={form}", "--format", "json")["memory"]["gpu_bytes"]
        for form in ("null", "int8", "nf4")
    )
    assert whole > int8 > nf4


def test_an_adapter_goes_on_a_quantised_base_of_a_pipeline_that_compares_shapes(tmp_path):
    tiny.flux().save_pretrained(tmp_path / "flux")
    call = {"num_inference_steps": 2, "height": 16, "width": 16, "max_sequence_length": 4}
    place, row = str(tmp_path / "flux"), [Row("a red circle", 0)]
    policy = load_policy(place, call=call, device="cpu", quantise="int8")
    weights = Weights(policy.modules, lora_config(2, 4, "auto", policy.modules))
    for p in weights.parameters:
        torch.nn.init.normal_(p, std=0.2)
    write_weights(policy, weights, tmp_path / "lora")
    options = {"call": call, "device": "cpu", "adapter": tmp_path / "lora"}
    fresh, whole = (load_policy(place, quantise=form, **options) for form in ("int8", None))
    pictures = [each.generate(row) for each in (policy, fresh, whole)]
    torch.testing.assert_close(pictures[0], pictures[1], rtol=0, atol=1e-6)  # an older MKL rounds by addresses
    assert (pictures[0] - pictures[2]).abs().max() > 1e-5
