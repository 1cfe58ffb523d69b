"""Optimizers with small moments: near AdamW, resumed to the bit, and refused in a sentence where they are not installed.

What needs bitsandbytes or torchao runs where it is installed.
"""

import math
from pathlib import Path

import pytest
import torch
from in_turn import after_first_step
from runs import metrics
from runs import weights as weights_of

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
    """A layer of 64 x 64 and its optimizer after steps on random gradients."""
    torch.manual_seed(0)
    weights = Weights({"net": torch.nn.Linear(64, 64, bias=False)}, None)
    torch.nn.init.normal_(weights.parameters[0])
    optimizer = optimizers.build(
        Train(optimizer=name, learning_rate=1e-3), [{"params": weights.parameters, "lr": 1e-3}]
    )
    for _ in range(steps):
        step(weights, optimizer, scale * torch.randn(64, 64), torch.amp.GradScaler("cpu", 8.0, enabled=scale != 1))
    return weights, optimizer


def step(weights, optimizer, gradient, scaler):
    stats = UpdateStats()
    weights.parameters[0].grad = gradient
    optimizer_step(weights, stats, optimizer=optimizer, scaler=scaler, max_grad_norm=1e9, reduce=lambda tensor: tensor)
    return stats


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


def test_a_gradient_that_is_not_finite_and_a_rate_of_0_move_nothing(word):
    weights, optimizer = stepped(word, 2)
    before = weights.parameters[0].detach().clone()
    broken = torch.full((64, 64), math.inf)
    stats = step(weights, optimizer, broken, torch.amp.GradScaler("cpu", enabled=False))
    assert (stats.skipped, stats.taken) == (1, 0)
    weights.parameters[0].grad = torch.ones(64, 64)
    for rate in (0.0, 1e-3):
        assert torch.equal(weights.parameters[0], before)
        optimizer.param_groups[0]["lr"] = rate
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
        name: memory_estimate(config.validate({"model": model, "train": {"optimizer": name}}))["gpu_bytes"]
        for name in LIBRARIES
    }
    trained = (needs["adamw"] - needs["adamw8bit"]) / (8 - 2 - 8 / 256)
    assert trained == int(trained) > 0


def run(word, name, *options):
    command = ["train", "tiny.yaml", f"run.name={name}", *SMALL, f"train.optimizer={word}", "run.checkpoint.keep=9"]
    assert main([*command, *options]) == 0
    return Path("runs") / name


def test_two_iterations_are_one_and_a_resume_and_one_to_the_bit(workplace, word):
    """The schedule is that of the whole run."""
    whole = run(word, "whole")
    after_first_step(Path("runs"), "whole", "parts")
    parts = run(word, "parts", "run.resume=true")
    one, other = (weights_of(folder, 2) for folder in (whole, parts))
    assert all(torch.equal(one[name], other[name]) for name in one)
    files = [folder / "checkpoints" / "step-000002" / "optimizer.pt" for folder in (whole, parts)]
    saved = [torch.load(file, weights_only=True)["optimizer"]["state"] for file in files]
    kept = [[tensor for index in sorted(state) for tensor in tensors(state[index])] for state in saved]
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(*kept, strict=True))
    assert any(tensor.dtype != torch.float32 for tensor in kept[0])
    rates = [line["policy/learning_rate"] for line in metrics(whole)]
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
    settings = config.apply_override(asked, ["train.optimizer.eps=1e-6"]).train.optimizer
    assert (settings.name, settings.eps, settings.betas) == ("adamw8bit", 1e-6, [0.9, 0.999])
    with pytest.raises(
        optimizers.InputError, match=r"train\.optimizer\.name: 'adam8bit' is not allowed, did you mean 'adamw8bit'"
    ):
        config.apply_override({"model": {"path": "shapes"}}, ["train.optimizer=adam8bit"])
