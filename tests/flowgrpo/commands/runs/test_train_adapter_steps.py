"""Runs that are evaluated with their training on a part of the schedule, and what leaves them."""

import json
from pathlib import Path

import pytest
from PIL import Image, ImageChops
from runs import CALL, metrics

from flowgrpo.cli import main

ARGUMENTS = [f"{k}={v}" for k, v in CALL.items()]


def pictures(folder, step):
    """The kept held-out pictures after a step, by name."""
    return {file.name: file.read_bytes() for file in Path(folder, "samples", f"step-{step:06d}").iterdir()}


@pytest.mark.parametrize("full", [False, pytest.param(True, marks=pytest.mark.zoo)])
def test_a_run_evaluated_without_its_training_stays_what_it_was(workplace, finished, full):
    changes = ["model.lora=null", "train.learning_rate=0.001"] if full else []
    assert main(["train", "tiny.yaml", "eval.adapter_steps=0:0", *changes]) == 0
    run, whole = workplace / "runs/t", finished / "runs/t"
    assert pictures(run, 0) == pictures(run, 1) == pictures(run, 2) == pictures(whole, 0) != pictures(whole, 2)
    before, *after = [line["reward/mean"] for line in metrics(run, "eval")]
    assert after == [before, before]
    if not full:  # what it learns is the same
        trained = [{k: v for k, v in line.items() if k.startswith(("policy/", "reward/"))} for line in metrics(run)]
        assert trained == [{k: v for k, v in line.items() if k in trained[0]} for line in metrics(whole)]


@pytest.mark.zoo
def test_a_run_evaluated_with_its_training_on_all_steps_is_an_ordinary_one(workplace, finished):
    assert main(["train", "tiny.yaml", "eval.adapter_steps=0:1"]) == 0
    assert pictures(workplace / "runs/t", 2) == pictures(finished / "runs/t", 2)


def test_an_evaluation_a_sample_and_the_card_s_code_are_the_same_picture(workplace, tiny_model, monkeypatch):
    assert (
        main(["train", "tiny.yaml", "eval.adapter_steps=0:0.6", "train.iterations=1", "train.learning_rate=0.05"]) == 0
    )
    assert main(["export", "runs/t", "--out", "lora"]) == 0
    of = ["sample", str(tiny_model), "--prompt", "a red circle", "--adapter", "lora"]
    for name, part in (("part", "0:0.6"), ("two", "0:0.34"), ("none", "0:0"), ("all", "0:1")):
        assert main([*of, "--out", name, "--adapter-steps", part, *ARGUMENTS]) == 0
    assert main([*of, "--out", "whole", *ARGUMENTS]) == 0
    assert main([*of[:4], "--out", "base", *ARGUMENTS]) == 0
    part, two, none, every, whole, base = (
        Path(name, "0000.png").read_bytes() for name in ("part", "two", "none", "all", "whole", "base")
    )
    assert pictures("runs/t", 1)["0000.png"] == Path("lora/sample-0.png").read_bytes() == part == two  # two of 3 steps
    assert none == base == pictures("runs/t", 0)["0000.png"]
    assert every == whole
    assert len({part, none, every}) == 3
    assert json.loads(Path("lora/sampler.json").read_text())["lora"]["adapter_steps"] == [0.0, 0.6]
    card = Path("lora/README.md").read_text()
    assert "--adapter-steps 0:0.6" in card
    assert "The adapters act on the part 0:0.6 of the steps; the model from before training took the others." in card
    names = {}
    monkeypatch.chdir("lora")
    exec(card.split("```python\n")[1].split("```")[0], names)
    shown = Image.open("sample-0.png").convert("RGB")
    assert max(high for _, high in ImageChops.difference(names["image"].convert("RGB"), shown).getextrema()) <= 1


def test_a_card_of_full_weights_says_how_they_were_evaluated(workplace):
    full = ["model.lora=null", "train.learning_rate=0.001", "train.iterations=1", "eval.every=2"]
    assert main(["train", "tiny.yaml", "eval.adapter_steps=0:0.5", *full]) == 0
    assert main(["export", "runs/t", "--out", "full"]) == 0
    assert "held-out rewards were measured with these weights on the part 0:0.5" in Path("full/README.md").read_text()
    assert json.loads(Path("full/sampler.json").read_text())["lora"] is None
    assert main(["sample", "full", "--prompt", "a red circle", "--out", "again", *ARGUMENTS]) == 0
    assert Path("full/sample-0.png").read_bytes() == Path("again/0000.png").read_bytes()


WHOLE = "tiny.yaml eval.adapter_steps=0:0.6 model.lora=null"
NO_BASE = "eval.adapter_steps: with model.lora=null there is no base model beside the trained one"
OF_ADAPTER = "--adapter-steps: it is for samples of an adapter, give --adapter DIR and --out DIR, too"
PART = "--adapter-steps: it is a part of a schedule of noise, digits is a language model"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (f"plan {WHOLE} algorithm.objective.kl.beta=0", NO_BASE),
        (f"train {WHOLE} run.sharding=fsdp2 run.processes=2", NO_BASE),
        (f"train {WHOLE} algorithm.objective.kl.reference=moving", NO_BASE),
        ("plan tiny.yaml eval.adapter_steps=0.6:0", "eval.adapter_steps: '0.6:0' does not lie between 0 and 1"),
        ("sample shapes --prompt a --out o --adapter-steps 0:0.5", OF_ADAPTER),
        ("sample shapes --prompt a --groups g --adapter x --adapter-steps 0:0.5", OF_ADAPTER),
        ("sample digits --prompt 1 --out o --adapter x --adapter-steps 0:0.5", PART),
        (
            "sample shapes --prompt a --out o --adapter x --adapter-steps half",
            "--adapter-steps: 'half' is no part of the schedule, write first:end",
        ),
    ],
)
@pytest.mark.usefixtures("unloaded", "workplace")
def test_where_there_is_no_base_model_a_part_is_refused_in_a_sentence(refused, words, said):
    assert refused(*words.split()).startswith(said)
