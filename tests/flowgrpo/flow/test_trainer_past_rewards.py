"""Runs whose baselines compare with the rewards of earlier iterations."""

import math
import statistics

import oracle
import pytest
import torch
from field import closeness, differing, lines, resumed, settings, trainer
from gaussian_flow import gradient, moments

KEPT = {"quantile": 2, "cumulative": 0}  # numbers that the baseline itself remembers


def run_of(folder, name, iterations=6, **options):
    choices = {"train__iterations": iterations, "train__half_life": 3.0, "algorithm__baseline": name}
    return trainer(settings(folder, **choices), **options)


@pytest.mark.parametrize("name", KEPT)
def test_a_resumed_run_is_the_run_that_was_never_stopped(tmp_path, name):
    """Each prompt is visited more than once, before the stop and after it."""
    whole = run_of(tmp_path / "a", name)
    whole.run()
    run_of(tmp_path / "b", name, 3).run()
    rest = resumed(run_of(tmp_path / "b", name), 3)
    assert lines(rest) == lines(whole)
    assert not differing(whole, rest)
    assert (rest.prompt_stats.seen, rest.memory) == (whole.prompt_stats.seen, whole.memory)
    assert len(rest.memory) == KEPT[name]


@pytest.mark.parametrize("name", KEPT)
def test_what_is_remembered_changes_the_run(tmp_path, name):
    runs = [run_of(tmp_path / kind, name) for kind in "ab"]
    runs[0].run()
    runs[1].iterate()
    runs[1].prompt_stats.seen.clear()
    runs[1].memory.clear()
    runs[1].done = 1
    runs[1].run()
    assert differing(*runs)


def test_the_first_quantiles_of_a_run_are_those_of_its_first_rewards(tmp_path):
    seen = []

    def watched(samples, prompts):
        seen.append(closeness(samples, prompts).double())
        return seen[-1]

    run = run_of(tmp_path, "quantile", reward=watched, held_out=0)
    run.iterate()
    levels = torch.tensor(run.config.algorithm.baseline.levels, dtype=torch.float64)
    assert run.memory == pytest.approx(torch.cat(seen).quantile(levels).tolist())


def test_an_update_climbs_the_expected_utility_of_a_linear_reward():
    """x is normal, and the quantiles are held at its mean and a standard deviation above.

    Half of it lies below them and 0.341 between them, so at every step the expected utility moves with the mean by
    (1.5 x 0.5 / 0.2 + 0.341 / 0.6) / 2.5.
    """
    baseline = {"name": "quantile", "std": "none", "rate": 1e-12}
    with oracle.trainer("flow_grpo", "linear", **{"algorithm.baseline": baseline}) as run:
        chain, _ = oracle.paths(run.rollout(0, run.groups(0)).tree)
        mean, variance = moments(chain)
        run.memory = [mean, mean + math.sqrt(variance)]
        seen = [oracle.batch(run, "linear", iteration) for iteration in range(30)]
    slope = (1.5 * 0.5 / 0.2 + (statistics.NormalDist().cdf(1) - 0.5) / 0.6) / 2.5
    steps = range(len(chain) - 1)
    exact = [slope * gradient(chain[:i], chain[i], chain[i + 1 :], "linear").theta for i in steps]
    for i in steps:
        found = [each.signal[i].theta for each in seen]
        assert abs(statistics.mean(found) - exact[i]) < 3.5 * statistics.stdev(found) / math.sqrt(len(found))
    total = statistics.mean(sum(each.signal[i].theta for i in steps) for each in seen)
    assert total == pytest.approx(sum(exact), rel=0.2)
