"""A resumed run is the run that was never stopped, and which checkpoints it finds."""

import json
import random
import shutil

import numpy as np
import pytest
import torch
from field import closeness, differing, lines, resumed, settings, trainer


def judged_at_a_whim(samples, prompts):
    """A plug-in that draws from every global generator there is."""
    whim = torch.randn(len(prompts)) + torch.from_numpy(np.random.randn(len(prompts))).float() + random.random()
    return closeness(samples, prompts) + whim


def test_six_iterations_are_three_and_a_resume_and_three(tmp_path):
    def begin():
        torch.manual_seed(1), np.random.seed(1), random.seed(1)

    begin()
    whole = trainer(settings(tmp_path / "a"), reward=judged_at_a_whim)
    whole.run()
    begin()
    half = trainer(settings(tmp_path / "b", train__iterations=3, eval__every=2), reward=judged_at_a_whim)
    half.run()
    torch.manual_seed(99), np.random.seed(99), random.seed(99)
    rest = resumed(trainer(settings(tmp_path / "b"), reward=judged_at_a_whim), 3)
    assert not differing(whole, rest)
    same = ("step", "reward/mean", "policy/grad_norm", "policy/mean_abs_log_ratio", "cost/model_evaluations")
    assert [[line[k] for k in same] for line in lines(whole)] == [[line[k] for k in same] for line in lines(rest)]


def test_the_rate_falls_over_the_run_and_goes_on_after_a_resume(tmp_path):
    chosen = {"train__schedule": "linear", "train__learning_rate": 0.06, "train__ema": {"decay": 0.9, "every": 4}}
    whole = trainer(settings(tmp_path, **chosen))
    whole.run()
    # 6 iterations of 2 steps; each line has the rate of its last step
    rates = [0.06 * (1 - step / 12) for step in (1, 3, 5, 7, 9, 11)]
    assert [line["policy/learning_rate"] for line in lines(whole)] == pytest.approx(rates)
    for step in (4, 5, 6):  # as if it had been killed
        shutil.rmtree(tmp_path / "r" / "checkpoints" / f"step-{step:06d}")
    rest = resumed(trainer(settings(tmp_path, **chosen)), 3)
    assert not differing(whole, rest)


def test_a_resume_drops_what_came_after_its_checkpoint(tmp_path):
    first = trainer(settings(tmp_path, run__checkpoint={"every": 4, "keep": 2}))
    first.run()
    (tmp_path / "r" / "checkpoints" / "step-000006").rename(tmp_path / "gone")
    with (tmp_path / "r" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "pha')  # a crash in the middle of a line
    again = trainer(settings(tmp_path))
    again.resume()
    written = [json.loads(line) for line in (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["phase"]) for line in written] == [
        (0, "eval"), (1, "train"), (2, "train"), (2, "eval"), (3, "train"), (4, "train"), (4, "eval"),
    ]  # fmt: skip
    again.run()
    assert torch.equal(first.weights.parameters[0], again.weights.parameters[0])


def test_half_a_checkpoint_does_not_count(tmp_path):
    run = trainer(settings(tmp_path, train__iterations=2))
    run.run()
    folder = tmp_path / "r" / "checkpoints"
    (folder / "step-000002").rename(folder / ".step-000009.partial")
    again = trainer(settings(tmp_path, train__iterations=2))
    again.resume()
    assert again.done == 1


def test_the_last_checkpoints_are_kept(tmp_path):
    trainer(settings(tmp_path, run__checkpoint={"every": 2, "keep": 2})).run()
    assert sorted(p.name for p in (tmp_path / "r" / "checkpoints").iterdir()) == ["step-000004", "step-000006"]
