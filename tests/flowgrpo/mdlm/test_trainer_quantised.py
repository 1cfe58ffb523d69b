"""A run of a language model on a quantised base: resume to the bit, memory, and an export that makes the run's answers."""

import json
from pathlib import Path

import torch
from read_card import blocks
from runs import weights

from flowgrpo.cli import main
from flowgrpo.commands.runs import train as run
from flowgrpo.mdlm import setup
from flowgrpo.mdlm.models.memory_estimate import memory_estimate

CHOICES = {"model__lora": {"rank": 2, "alpha": 4.0}, "model__quantise": "int8", "eval__every": 9, "eval__save": 0}


def test_the_memory_estimate_is_what_the_weights_and_their_optimizer_take(settings):
    policy, trainable = setup.policy_and_weights(settings(**CHOICES), torch.device("cpu"))
    trained = sum(p.nbytes for p in trainable.parameters)
    frozen = sum(p.nbytes for p in policy.predictor.model.parameters() if not p.requires_grad)
    assert memory_estimate(settings(**CHOICES))["gpu_bytes"] == frozen + 5 * trained


def test_two_iterations_are_one_and_a_resume_and_one_and_the_card_makes_their_answer(settings, monkeypatch, tmp_path):
    whole = run.train_config(settings(run__name="whole", **CHOICES))
    run.train_config(settings(run__name="parts", train__iterations=1, **CHOICES))
    parts = run.train_config(settings(run__name="parts", run__resume=True, **CHOICES))
    one, other = weights(whole.folder, 2), weights(parts.folder, 2)
    assert all(torch.equal(one[name], other[name]) for name in one)
    monkeypatch.chdir(tmp_path)
    assert main(["export", str(whole.folder), "--out", "out"]) == 0
    card = Path("out/README.md").read_text()
    assert "The base was kept in int8" in card
    assert "--quantise int8" in blocks(card)["sh"]
    monkeypatch.chdir("out")
    names = {}
    exec(blocks(card)["python"], names)
    assert names["answer"] == json.loads(Path("sample-0.json").read_text())["text"]
