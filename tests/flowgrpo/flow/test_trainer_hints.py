"""Runs with hints: which groups get them, what they are compared with, their gradient, and resumes."""

import math
import statistics
from collections import defaultdict

import ahead
import oracle
import pytest
import torch
from field import differing, lines, nearness, resumed, settings, trainer
from gaussian_flow import Step, gradient, velocity
from pair import pair

from flowgrpo.errors import InputError
from flowgrpo.flow.rollouts.rollout import walk

HINTS = {"name": "noised", "success": 1.0, "ladder": [0.0, 1.0]}


def beyond(samples, prompts):
    """A success is seldom."""
    return (samples[:, 0] > 1.2).float()


def run_of(folder, *, reward=beyond, hints=HINTS, iterations=8, **overrides):
    chosen = {"algorithm__hints": hints, "train__iterations": iterations, **overrides}
    return trainer(settings(folder, **chosen), reward=reward)


def batches(run, iterations):
    """Roll out and update, and yield each batch with the memory that it was rolled out with."""
    for iteration in range(iterations):
        before = {prompt: list(states) for prompt, states in run.hints.winners.items()}
        run.done = iteration
        batch = run.made(iteration).batch
        yield batch, before
        run.compare(batch)


def by_group(batch):
    """The starting steps of a batch's leaves, and the rewards of its plain samples, by group."""
    steps, rewards = defaultdict(list), defaultdict(list)
    for leaf in batch.tree.leaves:
        root = batch.tree.nodes[leaf].root
        steps[root.group].append(root.step)
    values, members = batch.outcomes
    for value, (group, _) in zip(values[:, 0].tolist(), members, strict=True):
        rewards[group].append(value)
    return steps, rewards


def test_only_groups_without_a_success_whose_prompt_has_won_before_get_hints(tmp_path):
    run = run_of(tmp_path)
    helped = 0
    for batch, winners in batches(run, 8):
        steps, rewards = by_group(batch)
        for group, prompt in enumerate(batch.groups.prompts):
            assert len(steps[group]) == len(rewards[group]) == 8
            hinted = sum(step > 0 for step in steps[group])
            assert hinted == (4 if prompt in winners and max(rewards[group]) < 1 else 0)
            helped += hinted
        assert batch.counts == {"reward/hinted": sum(step > 0 for own in steps.values() for step in own)}
        assert batch.decoded == 4 * 8 + batch.counts["reward/hinted"]
    assert helped


def test_hinted_samples_are_compared_with_each_other_alone(tmp_path):
    run = run_of(tmp_path, reward=lambda samples, prompts: samples[:, 0].sigmoid(), hints=HINTS | {"success": 0.75})
    seen = 0
    for batch, _ in batches(run, 8):
        units = run.wing.units(batch)
        nodes = [batch.tree.nodes[leaf].root for leaf in batch.tree.leaves]
        assert units.comparison.tolist() == [[root.group, root.step] for root in nodes]
        compared = run.compare(batch)
        for key in units.comparison.unique(dim=0):
            own = compared.advantages[(units.comparison == key).all(1)]
            assert float(own.sum()) == pytest.approx(0, abs=1e-5)
            seen += int(key[1]) > 0
    assert seen


def test_edges_above_a_noised_start_do_not_exist(tmp_path):
    run = run_of(tmp_path)
    for batch, _ in batches(run, 8):
        sigmas = batch.tree.sigmas
        for evaluation in batch.tree.evaluations:
            for edges in evaluation.edges:
                for node in edges.nodes.tolist():
                    root = batch.tree.nodes[node].root
                    assert evaluation.sigma <= sigmas[root.step]
    assert run.hints.ladders


def test_steps_of_hinted_trees_draw_noise_of_their_own(tmp_path, monkeypatch):
    """The noise of a failed group is known to fail."""
    addresses, real = [], walk

    def watched(*arguments, address="edge", **options):
        addresses.append(address)
        return real(*arguments, address=address, **options)

    monkeypatch.setattr("flowgrpo.flow.rollouts.rollout.walk", watched)
    run_of(tmp_path).run()
    assert set(addresses) == {"edge", "hinted edge"}


def test_a_run_replays_its_hinted_edges_with_a_ratio_of_one(tmp_path):
    run = run_of(tmp_path)
    run.run()
    told = lines(run)
    assert sum(line["reward/hinted"] for line in told) > 0
    assert all(line["policy/max_abs_log_ratio"] < 1e-6 for line in told)
    hinted = [line for line in told if line["reward/hinted"]]
    assert all(0 < line["hints/sigma"] < 1 and 0 <= line["hints/success"] <= 1 for line in hinted)
    assert all(line["hints/groups"] * 4 == line["reward/hinted"] for line in hinted)


@pytest.mark.parametrize("preset", ["flow_grpo_fast", "tempflow", "dense_grpo", "grpo_guard", "vgpo", "dance_grpo"])
def test_trees_of_every_kind_take_hints(tmp_path, preset):
    overrides = {"algorithm__preset": preset, "train__learning_rate": 1e-4}
    if preset == "tempflow":
        overrides |= {"train__group_size": 12}
    if preset == "dense_grpo":
        overrides |= {"algorithm__kernel__calibrate": None}
    run = run_of(tmp_path, reward=nearness, hints=HINTS | {"success": 2.0}, iterations=3, **overrides)
    run.hints.winners = {prompt: [(torch.tensor([1.5, -1.0]),)] for prompt in range(5)}
    run.run()
    for line in lines(run):
        assert line["hints/groups"] == 4
        assert line["reward/hinted"] >= 16
        assert line["policy/max_abs_log_ratio"] < 1e-5
        assert line["groups/teaching"] == 4


def test_the_run_remembers_plain_winners_within_its_bounds(tmp_path):
    """Samples with a hint are never remembered: their groups had no success without one."""
    run = run_of(tmp_path, hints=HINTS | {"winners": 2, "memory": 5})
    latest = {}
    for batch, _ in batches(run, 8):
        hinted = {node.root.group for node in batch.tree.nodes if node.root.step}
        for group, prompt, state in batch.hinted.won:
            assert group not in hinted
            assert beyond(state[0][None], [""])
            latest[prompt] = state
    assert {len(states) for states in run.hints.winners.values()} <= {1, 2}
    assert sum(map(len, run.hints.winners.values())) <= 5
    assert len(latest) > 1
    for prompt, states in run.hints.winners.items():
        assert torch.equal(states[-1][0], latest[prompt][0])


def test_a_resumed_run_is_the_run_that_was_never_stopped(tmp_path):
    whole = run_of(tmp_path / "a")
    whole.run()
    run_of(tmp_path / "b", iterations=4).run()
    rest = resumed(run_of(tmp_path / "b"), 4)
    assert lines(rest) == lines(whole)
    assert sum(line["reward/hinted"] for line in lines(whole)[4:]) > 0
    assert not differing(whole, rest)
    one, other = whole.hints.state(), rest.hints.state()
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert list(whole.hints.winners) == list(rest.hints.winners)


def test_what_is_remembered_changes_the_run(tmp_path):
    runs = [run_of(tmp_path / kind) for kind in "ab"]
    for run in runs:
        for run.done in range(4):
            run.iterate()
        run.done = 4
    runs[1].hints.winners.clear()
    for run in runs:
        run.run()
    assert differing(*runs)


def test_a_checkpoint_of_a_run_without_hints_is_refused(tmp_path):
    run_of(tmp_path, iterations=2, hints="none", reward=nearness).run()
    with pytest.raises(InputError, match="holds no state of hints"):
        run_of(tmp_path).resume()


def test_held_out_samples_have_no_hints(tmp_path):
    run = run_of(tmp_path)
    run.run()
    assert run.hints.winners
    with_memory = run.eval_samples()
    run.hints.winners.clear()
    run.hints.ladders.clear()
    assert [sample.rewards for sample in run.eval_samples()] == [sample.rewards for sample in with_memory]


def test_two_processes_remember_what_one_does(tmp_path):
    first, second = pair(ahead.hinting, tmp_path)
    alone = ahead.hinted(tmp_path / "alone")
    for found in (first, second):
        assert found.keys() == alone.keys()
        assert all(torch.allclose(found[name], alone[name], atol=1e-5) for name in alone)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert len(alone["order"])
    assert len(alone["ladders"])


def test_an_update_climbs_the_expected_reward_of_a_noised_start(monkeypatch):
    """Winners are N(m, s^2), so the start is N((1 - sigma) m, (1 - sigma)^2 s^2 + sigma^2), and all is known."""
    mean, std, first = 1.1, 0.4, 5
    sigma = oracle.SIGMAS[first]
    hints = HINTS | {"success": 1e9, "replace": 1.0, "ladder": [sigma - 0.01, sigma + 0.01], "winners": 16}
    overrides = {"algorithm.hints": hints, "algorithm.baseline": {"name": "leave_one_out", "std": "none"}}
    overrides |= {"algorithm.kernel": {"name": "flow_sde", "level": 0.7}}
    seen = []
    with oracle.trainer("flow_grpo", "quadratic", **overrides) as run:
        for iteration in range(60):
            drawn = torch.Generator().manual_seed(iteration)
            winners = mean + std * torch.randn(64, 1, generator=drawn)
            run.hints.winners[0] = [(x,) for x in winners]
            run.done = iteration
            made = run.made(iteration)
            chain, _ = oracle.paths(made.batch.tree)
            seen.append(oracle.replay(run, made)[0])
    slope, shift = velocity(1.0)
    centre, spread = (1 - sigma) * mean, math.sqrt((1 - sigma) ** 2 * std**2 + sigma**2)
    start = Step(1.0, spread - slope, 1.0, 0.0, theta=centre - shift)
    assert (start.slope, start.shift) == pytest.approx((spread, centre))
    steps = range(first, len(oracle.SIGMAS) - 2)
    assert {step for signal in seen for step in signal} == set(steps)  # none is trained above the start
    distances = []
    for i in steps:
        exact = gradient([start, *chain[first:i]], chain[i], chain[i + 1 :], "quadratic")
        for name in ("theta", "phi"):
            found = [getattr(signal[i], name) for signal in seen]
            error = statistics.stdev(found) / math.sqrt(len(found))
            distances.append((statistics.mean(found) - getattr(exact, name)) / error)
            assert error < 0.2 * abs(getattr(exact, name)) or name == "phi"
    assert max(map(abs, distances)) < 3
