import itertools
import math

import pytest
import torch

from flowgrpo.schema.sections import Select, Train
from flowgrpo.training.advantages.baseline import Best, GroupMean, LeaveOneOut, Median
from flowgrpo.training.advantages.credit_units import CreditUnits
from flowgrpo.training.advantages.unit_selection import (
    extremes,
    knapsack,
    max_variance,
    most_uncertain,
    normalize_advantages,
    robust_weights,
    root_variance,
    select_units,
)
from samplers import noise


def test_prompts_of_uncertain_outcome_are_drawn_most():
    count = torch.full((4,), 40.0, dtype=torch.float64)
    total = torch.tensor([0.0, 20.0, 40.0, 8.0], dtype=torch.float64)
    first = [most_uncertain(count, total, 1, noise.generator(0, "test", i))[0] for i in range(200)]
    assert first.count(1) > 190
    both = [set(most_uncertain(count, total, 2, noise.generator(0, "test", i))) for i in range(50)]
    assert both.count({1, 3}) == 50


def test_an_unknown_prompt_is_tried():
    count, total = torch.tensor([0.0, 40.0, 40.0]).double(), torch.tensor([0.0, 0.0, 40.0]).double()
    first = [most_uncertain(count, total, 1, noise.generator(0, "test", i))[0] for i in range(100)]
    assert first.count(0) > 80


def test_hard_prompts_weigh_more_and_the_mean_stays():
    difficulty = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    assert robust_weights(difficulty, 0.0).tolist() == pytest.approx([1, 1, 1])
    weights = robust_weights(difficulty, 2.0)
    assert weights.mean() == pytest.approx(1)
    assert (weights[2] / weights[0]).item() == pytest.approx(math.exp(2 * 0.8))


def test_a_budget_is_spent_where_it_teaches_as_exhaustive_search_would():
    p = torch.tensor([0.05, 0.3, 0.5, 0.95])

    def value(sizes):
        return sum((1 - q**n - (1 - q) ** n) * q * (1 - q) ** 2 for q, n in zip(p.tolist(), sizes, strict=True))

    sizes = knapsack(p, 20, 2, 9)
    best = max((s for s in itertools.product(range(2, 10), repeat=4) if sum(s) == 20), key=value)
    assert value(sizes) == pytest.approx(value(best))
    assert sum(sizes) == 20
    assert knapsack(torch.full((3,), 0.4), 12, 2, 8) == [4, 4, 4]


def test_a_budget_by_variance_is_what_exhaustive_search_finds():
    variance = [0.01, 0.3, 1.2, 0.09]
    sizes = root_variance(torch.tensor(variance), 20, 2, 9)

    def error(sizes):
        return sum(v / n for v, n in zip(variance, sizes, strict=True))

    best = min((s for s in itertools.product(range(2, 10), repeat=4) if sum(s) == 20), key=error)
    assert (sizes, sum(sizes)) == (list(best), 20)


def test_a_large_budget_is_shared_by_the_roots_of_the_variances():
    """The Lagrange condition, variance / n^2 alike for all prompts within the bounds."""
    variance = torch.tensor([0.04, 0.25, 1.0, 0.36], dtype=torch.float64)
    whole = root_variance(variance, 2300, 1, 9999)
    assert whole == [200, 500, 1000, 600]
    bounded = root_variance(variance, 2300, 300, 900)
    assert bounded[0] == 300
    assert bounded[2] == 900
    assert bounded[1] == pytest.approx(1100 * 5 / 11, abs=1)
    assert sum(bounded) == 2300


def test_equal_variances_share_a_budget_evenly():
    for variance in (0.0, 0.7):
        assert root_variance(torch.full((3,), variance), 12, 2, 8) == [4, 4, 4]
    assert sorted(root_variance(torch.full((3,), 0.7), 13, 2, 8)) == [4, 4, 5]


def test_the_choice_of_largest_variance_is_found():
    torch.manual_seed(1)
    for _ in range(20):
        values = torch.randn(9, dtype=torch.float64) ** 3
        best = max(itertools.combinations(range(9), 4), key=lambda c: values[list(c)].var(correction=0).item())
        assert sorted(max_variance(values, 4).tolist()) == list(best)


def test_extremes_are_the_best_and_the_worst():
    values = torch.tensor([0.3, 0.9, 0.1, 0.5, 0.7])
    assert extremes(values, 4).tolist() == [1, 4, 0, 2]
    assert extremes(values, 3).tolist() == [1, 4, 2]
    assert sorted(extremes(values, 5).tolist()) == [0, 1, 2, 3, 4]


def test_selection_is_within_the_sets_and_never_of_the_lost():
    values = torch.tensor([1.0, 2.0, 3.0, 4.0, math.nan, 1.0, 5.0, 2.0], dtype=torch.float64)
    sets = torch.tensor([[0]] * 4 + [[1]] * 4)
    assert select_units(values, sets, None).all()
    assert select_units(values, sets, Select(fraction=0.5)).nonzero()[:, 0].tolist() == [0, 3, 5, 6]


def test_two_of_a_set_are_selected_at_least():
    chosen = select_units(torch.arange(8).double(), torch.zeros(8, 1), Select(fraction=0.1))
    assert chosen.nonzero()[:, 0].tolist() == [0, 7]


@pytest.mark.parametrize("number", [2, 3, 5])
def test_across_the_batch_no_other_choice_has_more_variance_of_advantages(number):
    """By enumeration: the top a and the bottom b of all advantages, of which some groups have none (D3S)."""
    random = torch.Generator().manual_seed(number)
    values = torch.rand(8, generator=random, dtype=torch.float64)
    sets = torch.tensor([[0]] * 3 + [[1]] * 3 + [[2]] * 2)
    units = CreditUnits(values[:, None], sets, torch.ones(8).double(), torch.arange(8), root=torch.arange(8))
    select = Select(rule="max_variance", across="batch", fraction=number / 8)
    baseline = LeaveOneOut()
    options = {"weights": torch.ones(1).double(), "past": None, "baseline": baseline}
    advantages, trained = normalize_advantages(units, select=select, **options)
    every, _ = normalize_advantages(units, select=None, **options)
    assert torch.equal(advantages, every)  # normalised in whole groups, before the choice
    chosen = advantages[trained]
    assert len(chosen) == number
    subsets = itertools.combinations(range(8), number)
    most = max(float(advantages[list(each)].var(correction=0)) for each in subsets)
    assert float(chosen.var(correction=0)) == pytest.approx(most)


def test_lost_units_are_not_chosen_across_the_batch():
    values = torch.tensor([1.0, math.nan, 3.0, 5.0], dtype=torch.float64)
    units = CreditUnits(values[:, None], torch.zeros(4, 1).long(), torch.ones(4), torch.arange(4), root=torch.arange(4))
    select = Select(across="batch", fraction=1.0)
    options = {"weights": torch.ones(1).double(), "past": None, "baseline": GroupMean()}
    assert normalize_advantages(units, select=select, **options)[1].tolist() == [True, False, True, True]


def test_the_fraction_moves_linearly_to_that_of_the_end():
    select, train = Select(fraction=0.25, end=0.75), Train(iterations=5)
    assert [select.share(train.done_at(i)) for i in range(5)] == [0.25, 0.375, 0.5, 0.625, 0.75]
    assert Select(fraction=0.25).share(0.9) == 0.25
    assert Train(iterations=1).done_at(0) == 0
    values, sets = torch.arange(8).double(), torch.zeros(8, 1)
    assert [int(select_units(values, sets, select, done).sum()) for done in (0, 0.5, 1)] == [2, 4, 6]


def normalized(rewards, baseline, select=None):
    """Advantages of the samples of one group, and which of them are trained on."""
    zeros, size = torch.zeros(len(rewards), dtype=torch.long), len(rewards)
    values = torch.tensor(rewards, dtype=torch.float64)[:, None]
    units = CreditUnits(values, zeros[:, None], torch.ones(size).double(), zeros, root=zeros)
    options = {"weights": torch.ones(1).double(), "past": None}
    advantages, trained = normalize_advantages(units, baseline=baseline, select=select, **options)
    return advantages.tolist(), trained.tolist()


@pytest.mark.parametrize("drop_pivot", [False, True])
def test_the_pivot_leaves_where_it_is_to(drop_pivot):
    found = normalized([1.0, 2.0, 6.0], Median(std="none", drop_pivot=drop_pivot))
    assert found == ([-1, 0, 4], [True, not drop_pivot, True])


@pytest.mark.parametrize(
    ("rewards", "advantages", "trained"),
    [
        ([0, 0, 0, 1, 0], [0, 0, 0, 1000, 0], [False, True, True, True, True]),
        ([1, 1, 0, 1, 0], [0, 0, -1000, 0, -1000], [False, True, True, True, True]),
        ([0.1, 0.4, 0.9, 0.5], [-0.3 / 0.101, 0, 0.5 / 0.101, 0.1 / 0.101], [True, False, True, True]),
    ],
)
def test_one_pivot_leaves_each_group_as_in_the_code_of_mc_grpo(rewards, advantages, trained):
    """By the rule of its trainers: the lower median, the lower MAD + 1e-3, no bound, and one sample of the median leaves."""
    found, stays = normalized(rewards, Median())
    assert found == pytest.approx(advantages, rel=1e-7)
    assert stays == trained


def test_the_pivot_is_one_of_the_samples_that_are_selected():
    _, stays = normalized([0.0, 0.0, 1.0, 3.0], Median(), Select(fraction=0.75, statistics="kept"))
    assert stays == [False, True, False, True]  # the third is the median of the three that are selected


def test_samples_of_advantage_0_leave_by_another_baseline():
    assert normalized([1.0, 1.0, 4.0], Best())[1] == [False, False, True]
