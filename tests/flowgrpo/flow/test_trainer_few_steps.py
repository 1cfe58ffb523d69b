"""The embedded model of four steps gets better by a method of chains and by two of trees, in its own four steps."""

from pathlib import Path

import pytest
from runs import metrics

from flowgrpo.cli import main

SHAPES = str(Path(__file__).parents[3] / "configs/shapes.yaml")
LOOP = "train.iterations=20 train.groups=24 train.group_size=8 train.updates=2 eval.every=20"
GRID = "times: schedule, draws: 4"


@pytest.mark.zoo
@pytest.mark.parametrize(
    ("method", "rate"),
    [
        (f"{{preset: rvm, likelihood: {{{GRID}}}}}", 5e-5),
        (f"{{preset: awm_split, tree: {{splits: [1]}}, likelihood: {{{GRID}, steps: null, weight: velocity}}}}", 5e-5),
        ("{preset: tempflow, tree: {branches: 4}}", 1e-4),
    ],
)
def test_a_model_of_four_steps_gets_better_on_held_out_prompts(workplace, method, rate):
    run = ["run.name=few", "run.trees=null", "run.processes=1", "eval.save=0", f"train.learning_rate={rate}"]
    assert main(["train", SHAPES, "model.path=shapes4", f"algorithm={method}", *LOOP.split(), *run]) == 0
    before, after = (line["reward/mean"] for line in metrics(workplace / "runs/few", "eval"))
    assert after > before + 0.01
