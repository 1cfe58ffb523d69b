"""Chains that are stopped early: the gradient stays, a resume repeats the draws, and what is saved is counted."""

import shutil
from collections import Counter

import ahead
import pytest
import torch
from field import closeness, credit, differing, lines, resumed, settings, step_in_place, trainer
from oracle_stop import measure
from pair import pair

from flowgrpo.errors import InputError
from flowgrpo.flow.rollouts import early_stop
from rewards import Reward

STOP = {"step": 3, "keep": 0.5, "floor": 0.25}
ALGORITHM = {"preset": "flow_grpo", "baseline": {"name": "leave_one_out", "clip": 1e9}}
STOPPED = {"algorithm": {**ALGORITHM, "tree": {"stop": STOP}}}


def test_the_gradient_is_that_of_all_chains_and_the_survivors_mean_is_not():
    """On the Gaussian flow, whose gradient has a closed form."""
    batches = 60
    found, naive = (measure("quadratic", {**STOP, "step": 5}, batches, naive=naive) for naive in (False, True))
    distances, biased = (
        (each.updates.mean(0) - each.exact).abs() / (each.updates.std(0) / batches**0.5) for each in (found, naive)
    )
    assert float(distances.max()) < 3
    assert float(biased.max()) > 3


def test_chains_that_all_go_on_give_the_numbers_of_a_run_without_a_stop(tmp_path, monkeypatch):
    gradients = []
    monkeypatch.setattr(early_stop, "survival_chances", lambda foretold, *_: torch.ones(len(foretold)).double())
    for name, algorithm in {"without": ALGORITHM, "with": STOPPED["algorithm"]}.items():
        run = trainer(settings(tmp_path / name, algorithm=algorithm))
        step_in_place(run, credit(run, run.made(0).batch))
        gradients.append([p.grad.clone() for p in run.weights.parameters])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


def test_a_killed_run_goes_on_with_the_draws_of_the_run_that_was_not(tmp_path):
    whole = trainer(settings(tmp_path, **STOPPED))
    whole.run()
    for step in (4, 5, 6):
        shutil.rmtree(tmp_path / "r" / "checkpoints" / f"step-{step:06d}")
    rest = resumed(trainer(settings(tmp_path, **STOPPED)), 3)
    assert not differing(whole, rest)
    assert lines(rest) == lines(whole)


def test_what_is_saved_is_counted(tmp_path):
    whole, run = trainer(settings(tmp_path / "a", algorithm=ALGORITHM)), trainer(settings(tmp_path / "b", **STOPPED))
    whole.run(), run.run()
    for line, other in zip(lines(run), lines(whole), strict=True):
        stopped = line["cost/stopped"]
        assert 0 < stopped < 32
        assert line["cost/foretold"] == 32
        assert line["cost/decoded"] == 2 * 32 - stopped
        assert line["cost/saved_evaluations"] == 3 * stopped
        assert line["cost/rollout_evaluations"] == other["cost/rollout_evaluations"] - 3 * stopped
        assert line["cost/trained_edges"] == other["cost/trained_edges"] - 5 * stopped
        assert line["groups/left_out_fraction"] == stopped / 32
        assert line["policy/max_abs_log_ratio"] < 1e-6
        assert -1 <= line["stop/rank_agreement"] <= 1


def test_draws_do_not_depend_on_the_batches_of_the_rollout(tmp_path):
    stops = []
    for size in (5, 16):
        run = trainer(settings(tmp_path / str(size), **STOPPED, train__rollout_batch=size))
        batch = run.made(0).batch
        roots = [batch.tree.nodes[node].root for node in batch.stopped.nodes]
        weights = batch.stopped.weight.tolist()
        stops.append({(root.group, root.index): weight for root, weight in zip(roots, weights, strict=True)})
    assert stops[0] == pytest.approx(stops[1])
    assert 0 < sum(weight == 0 for weight in stops[0].values()) < 32
    going_on = [weight for weight in stops[0].values() if weight]
    assert 1 <= min(going_on) < max(going_on) <= 4  # 1 / chance, of at least 0.25


def test_the_divisor_of_the_loss_counts_stopped_chains(tmp_path):
    run = trainer(settings(tmp_path, **STOPPED))
    batch = run.made(0).batch
    credited = credit(run, batch)
    ended = [batch.stopped.nodes[place] for place in (batch.stopped.weight == 0).nonzero()[:, 0].tolist()]
    parts = Counter(batch.tree.nodes[node].root.part for node in ended)
    assert len(parts) == 2
    assert credited.stopped == {part: 5.0 * number for part, number in parts.items()}
    trained = sum(len(edges.nodes) for e in credited.tree.evaluations for edges in e.trained)
    assert trained + 5 * len(ended) == 32 * 5


def test_two_processes_stop_the_chains_of_one(tmp_path):
    first, second = pair(ahead.ending_early, tmp_path)
    lines, weights = ahead.ended_early(tmp_path / "alone")
    for found, of_process in (first, second):
        assert [line["cost/stopped"] for line in found] == [line["cost/stopped"] for line in lines]
        for name, weight in weights.items():
            torch.testing.assert_close(of_process[name], weight)


def test_an_iteration_whose_chains_are_all_stopped_takes_no_step(tmp_path, monkeypatch):
    real = early_stop.survivors
    monkeypatch.setattr(early_stop, "survivors", lambda chances, addresses: real(chances, addresses) & False)
    run = trainer(settings(tmp_path, **STOPPED, train__iterations=1, run__trees={"every": 1, "prompts": 1}))
    before = [p.clone() for p in run.weights.parameters]
    with pytest.raises(Exception, match="nothing to learn"):
        run.run()
    (line,) = lines(run)
    assert (line["cost/stopped"], line["cost/update_evaluations"], line["policy/updates"]) == (32, 0, 0)
    assert all(torch.equal(one, other) for one, other in zip(before, run.weights.parameters, strict=True))


def test_a_lost_prediction_counts_as_the_mean_and_a_lost_reward_leaves_its_group(tmp_path):
    def partly(samples, prompts):
        return closeness(samples, prompts).where(samples[:, 0] < 0, torch.nan)

    run = trainer(settings(tmp_path, **STOPPED), reward=partly)
    batch = run.made(0).batch
    assert batch.stopped.foretold.isfinite().all()
    compared = run.compare(batch)
    lost = ~compared.units.values.isfinite().any(1) & (compared.units.survival.weight > 0)
    assert lost.any()
    assert (compared.advantages[lost] == 0).all()
    assert compared.advantages.isfinite().all()


def test_a_reward_that_compares_the_samples_of_a_group_is_refused(tmp_path):
    grouped = Reward("ranks", lambda samples, prompts: samples, group_wise=True)
    early_stop.check_rewards(settings(tmp_path, algorithm=ALGORITHM), [grouped])
    with pytest.raises(InputError, match=r"^rewards: ranks compares the samples of a group"):
        early_stop.check_rewards(settings(tmp_path, **STOPPED), [grouped])
