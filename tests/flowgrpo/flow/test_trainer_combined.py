"""Runs whose rewards are put together before credit: what is credited, the metrics, the exact gradient, a resume."""

import math
import statistics

import oracle
import pytest
import torch
from field import TARGET, differing, lines, resumed, settings, trainer
from gaussian_flow import gradient, moments

from flowgrpo.training.advantages.reward_combination import Combination
from rewards import Reward


def left(samples, prompts):
    return -(samples[:, 0] - TARGET[0]).abs()


def low(samples, prompts):
    return -2 * (samples[:, 1] - TARGET[1]).abs()


def two():
    return [Reward("left", left), Reward("low", low, 0.5, offset=0.2)]


def at_once(form, rows):
    """What two rewards come to, written again."""
    members = [(a, 0.5 * (b - 0.2)) for a, b in rows]
    if form == "worst":
        return [min(pair) for pair in members]
    return [statistics.mean(pair) - 0.3 * statistics.pvariance(pair) for pair in members]


def chosen(folder, form, **more):
    options = {"combine": form, **({"caution": 0.3} if form == "cautious" else {})}
    return settings(folder, algorithm={"preset": "branch_grpo", "baseline": options}, **more)


@pytest.mark.parametrize("form", ["worst", "cautious"])
def test_leaves_are_put_together_before_their_mean_is_a_nodes(tmp_path, form):
    """A node's value is the mean of its leaves' worst, which is not the worst of its leaves' means."""
    run = trainer(chosen(tmp_path, form), rewards=two())
    batch = run.rollout(0, run.groups(0))
    units, tree = run.units(batch), batch.tree
    leaves = dict(zip(tree.leaves, at_once(form, batch.scores.values.tolist()), strict=True))
    assert units.values.shape[1] == 1
    several = 0
    for node, unit in enumerate(units.of_edge.tolist()):
        if unit < 0:
            continue
        below = [value for leaf, value in leaves.items() if node in tree.ancestry(leaf)]
        several += len(below) > 1
        assert units.values[unit].item() == pytest.approx(statistics.mean(below))
    assert several


@pytest.mark.parametrize("form", ["worst", "cautious"])
def test_metrics_have_each_reward_and_what_they_come_to(tmp_path, form):
    run = trainer(chosen(tmp_path, form, train__iterations=1), rewards=two())
    seen, evaluated = [], []
    rollout, eval_samples = run.rollout, run.eval_samples
    run.rollout = lambda *arguments: seen.append(rollout(*arguments)) or seen[-1]
    run.eval_samples = lambda: evaluated.append(eval_samples()) or evaluated[-1]
    run.run()
    rows = seen[0].outcomes[0].tolist()
    (line,) = lines(run)
    assert line["reward/mean"] == pytest.approx(statistics.mean(at_once(form, rows)))
    assert line["reward/std"] == pytest.approx(statistics.pstdev(at_once(form, rows)))
    for k, name in enumerate(("left", "low")):
        assert line[f"reward/{name}/mean"] == pytest.approx(statistics.mean(row[k] for row in rows))
    first = lines(run, "eval")[0]
    held_out = at_once(form, [(sample.rewards["left"], sample.rewards["low"]) for sample in evaluated[0]])
    assert len(held_out) == first["reward/count"] == 2
    assert first["reward/mean"] == pytest.approx(statistics.mean(held_out))


def test_a_reward_that_does_not_apply_is_not_the_worst_and_a_lost_sample_has_none(tmp_path):
    def sometimes(samples, prompts):
        return [None if i % 2 else math.inf if i == 2 else -100.0 for i in range(len(prompts))]

    run = trainer(chosen(tmp_path, "worst"), rewards=[Reward("left", left), Reward("sometimes", sometimes)])
    batch = run.rollout(0, run.groups(0))
    total = run.combination.total(batch.scores.values)
    lost, alone = batch.scores.lost, batch.scores.values[:, 1].isnan()
    assert lost.any()
    assert (alone & ~lost).any()
    assert (~alone).any()
    assert total[lost].isnan().all()
    torch.testing.assert_close(total[alone & ~lost], batch.scores.values[alone & ~lost, 0])
    assert (total[~alone] == -100).all()


@pytest.mark.parametrize("form", ["worst", pytest.param("cautious", marks=pytest.mark.zoo)])
def test_a_resumed_run_is_the_run_that_was_never_stopped(tmp_path, form):
    more = {"train__iterations": 4}
    whole = trainer(chosen(tmp_path / "a", form, **more), rewards=two())
    whole.run()
    trainer(chosen(tmp_path / "b", form, train__iterations=2), rewards=two()).run()
    rest = resumed(trainer(chosen(tmp_path / "b", form, **more), rewards=two()))
    assert lines(rest) == lines(whole)
    assert not differing(whole, rest)


def test_an_update_climbs_the_expected_worst_of_two_linear_rewards():
    """x is normal, so E min(x, 2 (0.9 - x)) moves with its mean by P(x < 0.6) - 2 P(x > 0.6), at every step."""
    first, second = (lambda samples, prompts: samples[:, 0]), (lambda samples, prompts: 2 * (0.9 - samples[:, 0]))
    overrides = {"algorithm.baseline": {"name": "leave_one_out", "combine": "worst"}}
    with oracle.trainer("flow_grpo", "linear", **overrides) as run:
        run.rewards = [Reward("first", first), Reward("second", second)]
        run.combination = Combination.of(run.rewards, run.config.algorithm.baseline)
        seen = [oracle.batch(run, "linear", iteration) for iteration in range(30)]
        chain, _ = oracle.paths(run.rollout(0, run.groups(0)).tree)
    mean, variance = moments(chain)
    below = statistics.NormalDist(mean, math.sqrt(variance)).cdf(0.6)
    slope = below - 2 * (1 - below)
    assert slope < -0.3
    for i in range(len(chain) - 1):
        found = [each.signal[i].theta for each in seen]
        expected = slope * gradient(chain[:i], chain[i], chain[i + 1 :], "linear").theta
        assert abs(statistics.mean(found) - expected) < 3.5 * statistics.stdev(found) / math.sqrt(len(found))
    total = statistics.mean(sum(each.signal[i].theta for i in range(len(chain) - 1)) for each in seen)
    exact = sum(slope * gradient(chain[:i], chain[i], chain[i + 1 :], "linear").theta for i in range(len(chain) - 1))
    assert total == pytest.approx(exact, rel=0.25)
