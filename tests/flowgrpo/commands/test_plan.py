"""`flowgrpo plan` beside `flowgrpo train`: what one refuses, the other does."""

import pytest

from flowgrpo.cli import main

FULL = ["model.lora=null", "train.groups=4", "run.processes=2", "run.sharding=fsdp2"]


@pytest.mark.parametrize(
    "options",
    [
        [*FULL, "model.dtype=float16"],
        ["run.sharding=hsdp", "model.offload_activations=true"],
    ],
)
def test_what_cannot_be_cut_is_refused_with_the_words_of_a_run(workplace, monkeypatch, capsys, options):
    monkeypatch.setenv("WORLD_SIZE", "1")  # a process of several, which starts no others
    said = []
    for command in ("train", "plan"):
        assert main([command, "tiny.yaml", *options]) == 2
        said.append(capsys.readouterr().err)
    assert said[0].startswith("flowgrpo: run.sharding: ")
    assert said[0] == said[1]


def test_what_can_be_cut_is_planned(workplace, capsys):
    assert main(["plan", "tiny.yaml", *FULL, "model.dtype=bfloat16"]) == 0
    assert "model evaluations" in capsys.readouterr().out
