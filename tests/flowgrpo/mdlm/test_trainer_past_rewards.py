"""Training of language models by baselines that compare with the rewards of earlier iterations."""

import pytest
import runs
import torch
from in_turn import after_first_step

from flowgrpo.commands.runs import train as run


@pytest.mark.parametrize(("name", "budget"), [("quantile", "equal"), ("cumulative", "root_variance")])
def test_a_resumed_run_is_the_run_that_was_never_stopped(settings, name, budget):
    choices = {"algorithm__preset": "diffu_grpo", "algorithm__baseline": name, "prompts__pick__budget": budget}

    def trained(run_name, **more):
        return run.train_config(settings(run__name=run_name, **choices, **more))

    whole = trained("whole")
    after_first_step(whole.folder.parent, "whole", "parts")
    rest = trained("parts", run__resume=True)
    one, other = runs.weights(whole.folder, 2), runs.weights(rest.folder, 2)
    assert all(torch.equal(one[key], other[key]) for key in one)
    assert runs.metrics(rest.folder)[-1]["groups/teaching"] > 0
