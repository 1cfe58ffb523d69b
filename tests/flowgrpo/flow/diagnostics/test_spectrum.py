"""The shares of a reward's variance, against those of a Gaussian flow, whose are known exactly."""

import math
import re
from itertools import pairwise

import pytest
import torch
from gaussian_flow import REWARDS, moments, schedule, step, velocity

from flowgrpo.data.prompts import Row
from flowgrpo.flow.diagnostics.spectrum import (
    ENOUGH,
    EVALUATIONS,
    FEWEST,
    cost_of_start,
    decided_at,
    geometry,
    measure,
    plan_nested,
    roots_of,
    shares_of,
    spectrum,
    squares_of,
    thirds,
)
from flowgrpo.flow.pipeline.velocity_field import FieldPolicy
from flowgrpo.flow.rollouts.rollout import rollout
from flowgrpo.training.advantages.baseline import GroupMean
from rewards import Reward
from samplers.growth import grow
from samplers.kernels import Kernel
from samplers.trees import Move, Root

SIGMAS = schedule(6)
SDE = Kernel("flow_sde", 0.7)


class Exact(torch.nn.Module):
    """The velocity of the Gaussian flow."""

    def __init__(self):
        super().__init__()
        self.shift = torch.nn.Parameter(torch.zeros(()))

    def forward(self, x, sigma, rows):
        slope, shift = velocity(min(SIGMAS, key=lambda s: abs(s - float(sigma[0]))))
        return slope * x + shift + self.shift


def grown(splits, starts, reward="linear", groups=1, all_part=()):
    policy = FieldPolicy(Exact(), (1,), SIGMAS)
    called = Reward(reward, lambda samples, prompts: REWARDS[reward](samples[:, 0]))
    roots = [Root(g, i, Row("", 1000 * g + i, {})) for g in range(groups) for i in range(starts)]
    plan = plan_nested([Move(SDE)] * (len(SIGMAS) - 2) + [Move()], splits, all_part)
    tree, scores = rollout(policy, plan, roots, rewards=[called], micro_batch=4096, seed=0, iteration=0)
    return tree, scores.values[:, 0]


def exact_shares():
    """Of a sum of independent noises: each one's variance at the end over the sum."""
    pairs = list(pairwise(SIGMAS))
    steps = [step("flow_sde", 0.7, *pair, SIGMAS[1]) for pair in pairs[:-1]]
    steps.append(step("ode", 0.0, *pairs[-1], SIGMAS[1]))
    slopes = [math.prod(each.slope for each in steps[i:]) ** 2 for i in range(len(steps) + 1)]
    _, total = moments(steps)
    own = [slopes[0], *(each.noise**2 * slopes[i + 1] for i, each in enumerate(steps[:-1]))]
    assert sum(own) == pytest.approx(total)
    return [each / total for each in own], total


def test_shares_are_those_of_the_noises_of_a_gaussian_flow():
    shares, variance = spectrum(*grown(range(5), starts=60, groups=2))
    exact, total = exact_shares()
    assert [share.of for share in shares] == ["start", *(f"step {i}" for i in range(5))]
    assert sum(share.share for share in shares) == pytest.approx(1)
    assert variance == pytest.approx(total, rel=0.2)
    for share, own in zip(shares, exact, strict=True):
        assert abs(share.share - own) < 3 * share.error
        assert 0 < share.error < 0.2


def test_steps_between_two_partings_are_told_as_one():
    shares, _ = spectrum(*grown((0, 2), starts=40))
    exact, _ = exact_shares()
    named = [("start", None), ("steps 0 to 1", (0, 2)), ("steps 2 to 4", (2, 5))]
    assert [(share.of, share.steps) for share in shares] == named
    for share, own in zip(shares, (exact[0], sum(exact[1:3]), sum(exact[3:])), strict=True):
        assert abs(share.share - own) < 3 * share.error


def test_chains_that_part_again_lower_the_errors_at_equal_evaluations():
    exact, _ = exact_shares()
    alone, _ = spectrum(*grown((0, 2, 4), starts=140))  # 140 * (6 + 5 + 3 + 1) evaluations
    nested, _ = spectrum(*grown((0, 2, 4), starts=100, all_part=(0, 2, 4)))  # 100 * (1 + 2 * 2 + 2 * 4 + 8)
    assert [share.steps for share in nested] == [None, (0, 2), (2, 4), (4, 5)]
    for share, own in zip(nested, (exact[0], sum(exact[1:3]), sum(exact[3:5]), exact[5]), strict=True):
        assert abs(share.share - own) < 3 * share.error
    assert sum(share.error for share in nested) < 0.85 * sum(share.error for share in alone)


def test_errors_are_those_of_each_group_alone():
    """Two groups of unequal variance: leaving out a start of one is compared with leaving out others of it."""
    tree, rewards = grown((0, 2, 4), starts=12, groups=2)
    groups = torch.tensor([tree.nodes[leaf].root.group for leaf in tree.leaves])
    rewards = rewards * (1 + 4 * groups)
    index = torch.tensor([tree.nodes[leaf].root.index for leaf in tree.leaves])
    squares = 0
    for group in range(2):
        left_out = [rewards.where((groups != group) | (index != start), torch.nan) for start in range(12)]
        without = torch.tensor([[share.share for share in spectrum(tree, each)[0]] for each in left_out])
        squares += 11 * without.var(0, correction=0)
    errors = [share.error for share in spectrum(tree, rewards)[0]]
    assert errors == pytest.approx(squares.sqrt().tolist(), rel=1e-3)


def test_prompts_that_differ_add_nothing():
    """What sets two groups apart is no part of the variance of either."""
    tree, rewards = grown(range(5), starts=10, groups=2)
    apart = rewards + torch.tensor([100.0 * tree.nodes[leaf].root.group for leaf in tree.leaves])
    for one, other in zip(spectrum(tree, rewards)[0], spectrum(tree, apart)[0], strict=True):
        assert one.share == pytest.approx(other.share, abs=1e-9)


def test_lost_rewards_are_left_out_and_equal_ones_have_no_shares():
    tree, rewards = grown(range(5), starts=10)
    rewards[3] = torch.nan
    assert sum(share.share for share in spectrum(tree, rewards)[0]) == pytest.approx(1)
    assert spectrum(tree, torch.ones_like(rewards)) == ([], 0.0)


def counted(steps, splits, starts):
    """The tree on states of one number."""
    sigmas, roots = [1 - i / steps for i in range(steps + 1)], [Root(0, i, None) for i in range(starts)]
    still, flat = lambda x, *_: x, lambda shape, *_: torch.zeros(shape)
    plan = plan_nested([Move(SDE)] * (steps - 1) + [Move()], splits, thirds(steps))
    return grow(plan, sigmas, roots, (torch.zeros(starts, 1),), still, flat, 64)


@pytest.mark.parametrize("steps", [1, 2, 4, 10, 28, 50, 100])
@pytest.mark.parametrize("prompts", [1, 8])
@pytest.mark.parametrize("evaluations", [EVALUATIONS, 60_000])
def test_evaluations_are_bounded_whatever_the_schedule(steps, prompts, evaluations):
    splits, taken, starts = geometry(steps, prompts, evaluations)
    tree = counted(steps, splits, starts=3)  # each of which grows as every other
    assert sum(len(evaluation.rows) for evaluation in tree.evaluations) == 3 * cost_of_start(steps, splits)
    assert set(thirds(steps)) <= set(splits)
    assert 1 <= taken <= prompts
    assert starts >= FEWEST
    rows = taken * starts * cost_of_start(steps, splits)
    assert rows <= evaluations or (taken, starts) == (1, FEWEST)


def test_the_schedule_is_cut_as_finely_as_leaves_enough_starts():
    assert geometry(24, 1, 600)[0] == [0, 8, 16]
    assert geometry(24, 1, 60_000)[0] == [0, 4, 8, 12, 16, 20]
    assert geometry(24, 1, 240_000)[0] == list(range(23))
    splits, prompts, starts = geometry(10, 8, 60_000)
    assert (splits, prompts) == (list(range(9)), 8)
    assert prompts * starts >= ENOUGH


@pytest.mark.parametrize("split", [0, 3])
def test_the_noise_of_one_step_decides_what_it_does_in_a_gaussian_flow(split):
    policy = FieldPolicy(Exact(), (1,), SIGMAS)
    linear = Reward("linear", lambda samples, prompts: samples[:, 0])
    policy.start([Row("", 0, {})])
    roots = roots_of([Row("a", 0, {}), Row("b", 0, {})], 150)
    options = {"baseline": GroupMean(), "kernels": [SDE] * 6, "split": split, "size": 4096}
    found = decided_at(policy, [linear], roots, **options)
    steps = [step("ode", 0.0, *pair, SIGMAS[1]) for pair in pairwise(SIGMAS)]
    steps[split] = step("flow_sde", 0.7, *list(pairwise(SIGMAS))[split], SIGMAS[1])
    own = steps[split].noise ** 2 * math.prod(each.slope for each in steps[split + 1 :]) ** 2
    assert found == pytest.approx(own / moments(steps)[1], rel=0.2)
    constant = Reward("constant", lambda samples, prompts: torch.ones(len(samples)))
    assert decided_at(policy, [constant], roots, **options) == 0


def test_parts_are_sums_of_shorter_ones_with_errors_of_their_own():
    tree, rewards = grown(range(5), starts=40)
    (_, *single), _ = spectrum(tree, rewards)

    def by_parts(rewards):
        return shares_of(squares_of(tree, rewards), [0, 2, 4], 5)[0]

    start, *parts = by_parts(rewards)
    assert [part.steps for part in parts] == [(0, 2), (2, 4), (4, 5)]
    sums = [single[0].share + single[1].share, single[2].share + single[3].share, single[4].share]
    assert [part.share for part in parts] == pytest.approx(sums)
    assert start.share + sum(sums) == pytest.approx(1)
    without = []
    for left_out in range(40):
        known = torch.tensor([tree.nodes[leaf].root.index != left_out for leaf in tree.leaves])
        without.append([share.share for share in by_parts(rewards.where(known, torch.nan))])
    errors = 39 * torch.tensor(without).var(0, correction=0)
    assert [share.error for share in (start, *parts)] == pytest.approx(errors.sqrt().tolist(), rel=1e-3)


def test_a_check_tells_a_table_and_what_it_took():
    policy = FieldPolicy(Exact(), (1,), SIGMAS)
    linear = Reward("linear", lambda samples, prompts: samples[:, 0])
    policy.start([Row("", 0, {})])
    rows = [Row("a", 0, {}), Row("b", 0, {})]
    found = measure(policy, [linear], rows, baseline=GroupMean(), kernels=[SDE] * 6, size=64, evaluations=600)
    told = found.check
    assert (told.ok, told.name) == (True, "spectrum")
    assert sum(row["share"] for row in told.table) == pytest.approx(1)
    assert [row["of"] for row in told.table] == ["start", "steps 0 to 1", "steps 2 to 3", "step 4"]
    # of each of 2 prompts 14 starts, whose 8 chains have 1 + 2 * 2 + 2 * 4 + 8 evaluations
    assert "588 evaluations, 224 samples" in told.value
    assert re.search(r"by flow_sde 0.7: start -?\d+% ± \d+%, steps 0 to 1 -?\d+%", told.value)
    assert len(found.shares) == 4
    assert 0 < found.reward_seconds < 1
