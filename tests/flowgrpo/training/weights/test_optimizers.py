"""Optimizers with small moments: near AdamW, resumed to the bit, and refused in a sentence where they are not installed.

What needs bitsandbytes or torchao runs where it is installed.
"""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from flowgrpo import config
from flowgrpo.cli import main
from flowgrpo.flow.model.memory_estimate import memory_estimate
from flowgrpo.schema.sections import Train
from flowgrpo.training.weights import optimizers
from flowgrpo.training.weights.optimizer_step import UpdateStats, optimizer_step
from flowgrpo.training.weights.trained_weights import Weights

LIBRARIES = {word: maker.module.partition(".")[0] for word, maker in optimizers.OPTIMIZERS.items()}
# The distance after 20 steps at a rate of 1e-3, as a part of the weights, twice as large as it was measured.
NEAR = {"adamw8bit": 2e-4}
SMALL = ["model.lora.rank=256", "train.schedule=linear", "eval.every=9", "eval.prompts=1", "eval.save=0"]


@pytest.fixture(params=[word for word in LIBRARIES if word != "adamw"])
def word(request):
    """The name of each small optimizer whose library is installed."""
    pytest.importorskip(LIBRARIES[request.param])
    return request.param


def stepped(name, steps=20, scale=1.0):
    """A layer of 64 x 64, its optimizer and the last step's statistics, after steps on random gradients."""
    torch.manual_seed(0)
    weights = Weights({"net": torch.nn.Linear(64, 64, bias=False)}, None)
    torch.nn.init.normal_(weights.parameters[0])
    optimizer = optimizers.build(
        Train(optimizer=name, learning_rate=1e-3), [{"params": weights.parameters, "lr": 1e-3}]
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=scale != 1)
    for _ in range(steps):
        stats = UpdateStats()
        weights.parameters[0].grad = scale * torch.randn(64, 64)
        optimizer_step(
            weights, stats, optimizer=optimizer, scaler=scaler, max_grad_norm=1e9, reduce=lambda tensor: tensor
        )
    return weights, optimizer, stats


def test_it_is_near_adamw_with_and_without_a_scaled_loss(word):
    wanted = stepped("adamw")[0].parameters[0]
    off = (stepped(word)[0].parameters[0] - wanted).norm() / wanted.norm()
    assert 0 < off < NEAR[word]
    assert torch.equal(stepped(word, scale=8.0)[0].parameters[0], stepped(word)[0].parameters[0])


def test_how_a_step_is_taken_is_for_the_machine_that_takes_it():
    """A checkpoint of a GPU, whose steps are fused, goes on with the steps of this machine, and the other way round."""
    p = torch.nn.Parameter(torch.ones(3))
    for here, there in ((None, True), (True, None)):
        saved, optimizer = (torch.optim.AdamW([p], fused=fused) for fused in (there, here))
        p.grad = torch.ones(3)
        saved.step()
        optimizers.restore(optimizer, saved.state_dict())
        assert optimizer.param_groups[0]["fused"] is here
        assert torch.equal(optimizer.state[p]["exp_avg"], saved.state[p]["exp_avg"])
        optimizer.step()


def test_a_checkpoint_of_more_groups_is_refused():
    a, b = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    two = torch.optim.AdamW([{"params": [a]}, {"params": [b], "lr": 1.0}])
    with pytest.raises(ValueError, match="different number of parameter groups"):
        optimizers.restore(torch.optim.AdamW([a]), two.state_dict())


def test_a_gradient_that_is_not_finite_moves_nothing(word):
    weights, optimizer, _ = stepped(word, 2)
    before = weights.parameters[0].detach().clone()
    weights.parameters[0].grad = torch.full((64, 64), math.inf)
    stats = UpdateStats()
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    optimizer_step(weights, stats, optimizer=optimizer, scaler=scaler, max_grad_norm=1.0, reduce=lambda tensor: tensor)
    assert (stats.skipped, stats.taken) == (1, 0)
    assert torch.equal(weights.parameters[0], before)


def test_a_rate_of_0_moves_nothing(word):
    weights, optimizer, _ = stepped(word, 2)
    before = weights.parameters[0].detach().clone()
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    assert torch.equal(weights.parameters[0], before)
    optimizer.param_groups[0]["lr"] = 1e-3
    optimizer.step()
    assert not torch.equal(weights.parameters[0], before)


def tensors(value):
    """All tensors of a state but what is shared (tables of values) and the count of steps, by their keys."""
    for key, inner in value.items():
        if isinstance(inner, dict):
            yield from tensors(inner)
        elif isinstance(inner, torch.Tensor) and key != "step" and "qmap" not in key:
            yield inner


def test_the_moments_have_the_bytes_that_the_memory_estimate_counts(word):
    for name in (word, "adamw"):
        state = stepped(name, 1)[1].state_dict()
        kept = list(tensors(state["state"][0]))
        assert {type(tensor) for tensor in kept} == {torch.Tensor}
        assert sum(tensor.nbytes for tensor in kept) == 64 * 64 * optimizers.OPTIMIZERS[name].bytes_per_number


def test_the_memory_estimate_counts_fewer_bytes_of_each_trained_number(tiny_model):
    model = {"path": str(tiny_model), "text_encoders": "keep"}
    needs = {
        name: memory_estimate(config.validated({"model": model, "train": {"optimizer": name}}))["gpu_bytes"]
        for name in LIBRARIES
    }
    trained = (needs["adamw"] - needs["adamw8bit"]) / (8 - 2 - 8 / 256)
    assert trained == int(trained) > 0


def run(name, *options):
    assert main(["train", "tiny.yaml", f"run.name={name}", *SMALL, *options]) == 0
    place = Path("runs") / name
    lines = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    return place / "checkpoints/step-000002", [line for line in lines if line["phase"] == "train"]


def test_two_iterations_are_one_and_a_resume_and_one_to_the_bit(workplace, word):
    whole, lines = run("whole", f"train.optimizer={word}")
    assert (
        main(["train", "tiny.yaml", "run.name=parts", *SMALL, f"train.optimizer={word}", "run.checkpoint.keep=9"]) == 0
    )
    # As if it had been stopped after the first iteration: the schedule is that of the whole run.
    for left in Path("runs/parts/checkpoints/step-000002").iterdir():
        left.unlink()
    Path("runs/parts/checkpoints/step-000002").rmdir()
    parts, _ = run("parts", f"train.optimizer={word}", "run.resume=true")
    one, other = (load_file(place / "weights.safetensors") for place in (whole, parts))
    assert all(torch.equal(one[name], other[name]) for name in one)
    saved = [torch.load(place / "optimizer.pt", weights_only=True)["optimizer"]["state"] for place in (whole, parts)]
    kept = [[tensor for index in sorted(state) for tensor in tensors(state[index])] for state in saved]
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(*kept, strict=True))
    assert any(tensor.dtype != torch.float32 for tensor in kept[0])
    rates = [line["policy/learning_rate"] for line in lines]
    assert rates == pytest.approx([0.01 * 3 / 4, 0.01 * 1 / 4])


def test_without_its_library_it_is_refused_in_a_sentence(workplace, capsys, monkeypatch):
    find = optimizers.find_spec
    monkeypatch.setattr(optimizers, "find_spec", lambda name: None if name == "bitsandbytes" else find(name))
    assert main(["train", "tiny.yaml", "train.optimizer.name=adamw8bit"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert (
        "train.optimizer.name: adamw8bit needs the package bitsandbytes, pip install 'flowgrpo[8bit]', or take adamw"
        in said
    )
    assert not Path("runs").exists()


def test_a_word_is_its_name():
    asked = {"model": {"path": "shapes"}, "train": {"optimizer": "adamw8bit"}}
    settings = config.overridden(asked, ["train.optimizer.eps=1e-6"]).train.optimizer
    assert (settings.name, settings.eps, settings.betas) == ("adamw8bit", 1e-6, [0.9, 0.999])
    with pytest.raises(
        optimizers.InputError, match=r"train\.optimizer\.name: 'adam8bit' is not allowed, did you mean 'adamw8bit'"
    ):
        config.overridden({"model": {"path": "shapes"}}, ["train.optimizer=adam8bit"])
