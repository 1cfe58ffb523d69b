"""What becomes of samples, rewards and gradients that are no numbers."""

import json
import math

import pytest
import torch
from field import Network, closeness, lines, settings, trainer, weights_of

from flowgrpo.training.run.stop_reasons import Broken


def at_once(reward):
    """A reward that is not tried again, as one on a server, which has a thread of its own too."""
    reward.remote = True
    return reward


class Breaking(Network):
    """Not a number below sigma 0.7 for one sample."""

    seed = None

    def forward(self, x, sigma, rows):
        broken = torch.tensor([row.seed == self.seed for row in rows]) & (sigma < 0.7)
        return super().forward(x, sigma, rows) * torch.ones(len(x), 1).masked_fill(broken[:, None], math.nan)


def lenient(samples, prompts):
    """A reward that makes a number of what is none, and a good one."""
    return closeness(samples, prompts).nan_to_num(100.0)


@pytest.mark.parametrize("reward", [closeness, lenient])
@pytest.mark.parametrize("preset", ["flow_grpo", "branch_grpo"])
def test_a_sample_that_is_not_a_number_costs_itself_and_not_the_step(tmp_path, preset, reward):
    """The update of 40 samples of which one breaks is that of the other 39 (of a tree's 20: the other trees')."""

    def begin(name):
        chosen = {"train__group_size": 10, "train__iterations": 1, "eval__every": 9}
        if preset == "branch_grpo":
            chosen["algorithm"] = {"preset": preset, "tree": {"factor": 5, "splits": [0]}}
        run = trainer(settings(tmp_path / name, **chosen), Breaking(), reward, held_out=0)
        start = run._roots(0, run.groups(0), run._starts(0, run.groups(0)).starts)
        return run, start[len(start) // 2]

    broken, root = begin("broken")
    broken.policy.modules["field"].seed = root.row.seed
    broken.run()
    without, root = begin("without")
    whole = without._roots
    without._roots = lambda *arguments: [r for r in whole(*arguments) if r != root]
    without.run()
    line = lines(broken)[0]
    assert line["policy/skipped_updates"] == 0
    assert line["reward/lost"] == (1 if preset == "flow_grpo" else 5)
    for name, tensor in weights_of(without).items():
        torch.testing.assert_close(weights_of(broken)[name], tensor, rtol=0, atol=1e-6)


class Diverging(Network):
    """Not a number for every sample, from the iteration `after` on."""

    run, after = None, 0

    def forward(self, x, sigma, rows):
        diverged = self.run is not None and self.run.done >= self.after
        return super().forward(x, sigma, rows) * (math.nan if diverged else 1.0)


def test_samples_that_are_not_finite_are_lost_without_asking_a_reward_and_good_checkpoints_stay(tmp_path):
    """A reward that takes NaN for black, as every one that makes 8-bit pictures does, saw nothing wrong."""
    asked = []

    def of_pictures(samples, prompts):
        asked.append(len(samples))
        assert samples.isfinite().all()
        return closeness(samples.nan_to_num(0.0), prompts)

    chosen = settings(tmp_path, eval__every=1, eval__save=2, run__checkpoint={"every": 1, "keep": 2})
    run = trainer(chosen, Diverging(), reward=of_pictures)
    run.policy.modules["field"].run, run.policy.modules["field"].after = run, 3
    run.samples = NoFiles()
    with pytest.raises(Broken, match="^ended after step 6: no held-out sample has a reward any more$") as ended:
        run.run()
    assert ended.value.rest == "go on from step 2, the last that was sound,"
    assert [line["reward/lost"] for line in lines(run)] == [0, 0, 0, 32, 32, 32]
    assert [line["reward/mean"] is None for line in lines(run)] == [False] * 3 + [True] * 3
    assert sum(asked) == 3 * (32 + 2)  # three iterations, and the evaluations before them
    assert run.samples.kept == {0: 2, 1: 2, 2: 2, 3: 0, 4: 0, 5: 0, 6: 0}
    kept = sorted(path.name for path in (tmp_path / "r" / "checkpoints").iterdir())
    assert kept == ["step-000001", "step-000002", "step-000005", "step-000006"]  # 3 gave nothing but NaN


class NoFiles:
    """Counts the samples that would have been written, by step."""

    def __init__(self):
        self.kept = {}

    def write(self, samples, step):
        self.kept[step] = sum(sample.decoded is not None for sample in samples)


class Poisoned(Network):
    """Not a number as soon as a gradient is asked for."""

    def forward(self, x, sigma, rows):
        return super().forward(x, sigma, rows) * (math.nan if torch.is_grad_enabled() else 1.0)


def test_a_gradient_that_is_not_finite_is_skipped_and_seen(tmp_path):
    run = trainer(settings(tmp_path, train__iterations=1, train__replay="always", run__patience=None), Poisoned())
    before = weights_of(run)
    run.run()
    assert all(torch.equal(before[name], t) for name, t in weights_of(run).items())
    assert lines(run)[0]["policy/skipped_updates"] == 2
    written = [json.loads(line) for line in (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()]
    assert written[1]["policy/max_abs_log_ratio"] is None
    assert "NaN" not in (tmp_path / "r" / "metrics.jsonl").read_text()


def test_a_reward_that_fails_now_and_then_is_tried_again(tmp_path):
    calls = []

    def shaky(samples, prompts):
        calls.append(1)
        if len(calls) % 2:
            raise ConnectionError("busy")
        return closeness(samples, prompts)

    run = trainer(settings(tmp_path, train__iterations=1, eval__every=9), reward=shaky)
    run.run()
    assert lines(run)[0]["reward/lost"] == 0


def test_samples_whose_reward_is_lost_are_dropped_and_counted(tmp_path):
    @at_once
    def broken_for_a(samples, prompts):
        if prompts[0] == "a":
            raise ConnectionError("gone")
        values = closeness(samples, prompts).tolist()
        return [math.nan, *values[1:]]

    run = trainer(settings(tmp_path, train__iterations=5), reward=broken_for_a)
    run.run()
    lost = [line["reward/lost"] for line in lines(run)]
    assert sum(lost) == 4 * 8 + 16 * 1  # of 20 groups, "a" came 4 times and lost all 8; the others lost one each
    assert all(math.isfinite(line["reward/mean"]) for line in lines(run))
    assert all(t.isfinite().all() for t in weights_of(run).values())


def test_an_iteration_without_any_reward_changes_nothing(tmp_path):
    @at_once
    def gone(samples, prompts):
        raise ConnectionError("gone")

    run = trainer(settings(tmp_path, train__iterations=1, train__ema=None, run__patience=None), reward=gone)
    before = weights_of(run)
    run.run()
    assert all(torch.equal(before[name], t) for name, t in weights_of(run).items())
    assert lines(run)[0]["reward/mean"] is None
    assert lines(run)[0]["reward/lost"] == 32
