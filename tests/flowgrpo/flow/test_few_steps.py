"""The embedded model of four steps gets better by a method of chains and by one of trees, in its own four steps."""

from pathlib import Path

import pytest
from runs import metrics

from flowgrpo.cli import main

SHAPES = str(Path(__file__).parents[3] / "configs/shapes.yaml")
LOOP = "train.iterations=20 train.groups=24 train.group_size=8 train.updates=2 train.learning_rate=1e-4 eval.every=20"


@pytest.mark.zoo
@pytest.mark.parametrize(
    "method",
    ["{preset: rvm, likelihood: {times: schedule, draws: 4}}", "{preset: tempflow, tree: {branches: 4}}"],
)
def test_a_model_of_four_steps_gets_better_on_held_out_prompts(workplace, method):
    run = ["run.name=few", "run.trees=null", "run.processes=1", "eval.save=0"]
    assert main(["train", SHAPES, "model.path=shapes4", f"algorithm={method}", *LOOP.split(), *run]) == 0
    before, after = (line["reward/mean"] for line in metrics(workplace / "runs/few", "eval"))
    assert after > before + 0.01
