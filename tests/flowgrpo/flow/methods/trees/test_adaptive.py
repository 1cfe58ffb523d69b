"""Where an adaptive tree puts its children, against what can be reckoned by hand or by trying all shapes."""

import itertools
import random

import pytest

from flowgrpo import config
from flowgrpo.errors import InputError
from flowgrpo.flow.methods.trees.adaptive import LEAST, neyman
from flowgrpo.flow.planning.iteration_forecast import predict_cost
from flowgrpo.flow.planning.tree_diagram import draw_tree
from samplers.kernels import Kernel

KERNELS = [Kernel("flow_sde", 0.7)] * 5


def spread(variances, counts):
    return sum(v / (n - 1) for v, n in zip(variances, counts, strict=True))


def cost(costs, counts):
    return sum(c * n for c, n in zip(costs, counts, strict=True))


def written(**axes):
    """A run of the row, with some of its axes replaced."""
    chosen = {"preset": "adaptive", **axes}
    return {"model": {"path": "field", "lora": None}, "algorithm": chosen, "train": {"group_size": 24}}


def tree(**options):
    return config.validate(written(tree=options)).algorithm.tree


def test_children_follow_std_over_root_cost():
    """Neyman's rule in the limit: (n - 1) as sqrt(variance / cost), here as 1 : 2 : 1 for costs 1, 1, 4."""
    counts = neyman([1.0, 4.0, 4.0], [1.0, 1.0, 4.0], 40_000.0)
    first, second, third = (n - 1 for n in counts)
    assert second / first == pytest.approx(2, rel=2e-3)
    assert third / first == pytest.approx(1, rel=2e-3)


def test_the_shape_is_hardly_worse_than_the_best_of_all_shapes():
    numbers = random.Random(0)
    for _ in range(40):
        variances = [numbers.expovariate(1.0) for _ in range(3)]
        costs = [float(numbers.randint(1, 4)) for _ in range(3)]
        budget = LEAST * sum(costs) + numbers.randint(0, 20)
        counts = neyman(variances, costs, budget)
        assert min(counts) >= LEAST
        assert cost(costs, counts) <= budget
        assert budget - cost(costs, counts) < min(costs)
        shapes = itertools.product(range(LEAST, 23), repeat=3)
        best = min(spread(variances, each) for each in shapes if cost(costs, each) <= budget)
        # What the last child could not be spent on is all that integers cost.
        assert spread(variances, counts) <= best + max(variances) / 2
        uniform = budget // sum(costs)
        assert spread(variances, counts) <= spread(variances, [uniform] * 3) * 1.0001


def test_equal_steps_are_filled_from_the_first_and_steps_without_spread_stay():
    assert neyman([1.0, 1.0, 1.0], [2.0, 2.0, 2.0], 16.0) == [3, 3, 2]
    assert neyman([0.0, 1.0, 0.0], [2.0, 2.0, 2.0], 24.0) == [2, 8, 2]
    assert neyman([0.0, 0.0], [1.0, 1.0], 100.0) == [2, 2]


def test_costs_are_the_evaluations_that_finish_a_child_and_its_sample():
    assert tree().costs(KERNELS) == [4, 3, 2, 1]
    assert tree(finish=2).costs(KERNELS) == [2, 2, 2, 1]
    assert tree(sample_cost=0.5).costs(KERNELS) == [4.5, 3.5, 2.5, 1.5]
    assert tree(sample_cost=0.5, last_step="sde").costs(KERNELS) == [4.5, 3.5, 2.5, 1.5, 0.5]


def test_a_later_shape_costs_what_the_first_did_at_most():
    shape = tree(branches=6).reshape(KERNELS, [1.0, 1.0, 1.0, 100.0])
    assert shape == [3, 3, 3, 33]  # by Neyman's rule 2.7, 2.9, 3.3 and 34
    assert cost([4, 3, 2, 1], shape) == 6 * (4 + 3 + 2 + 1)
    own = tree(branches=6, profile=[2, 2, 2, 30])
    assert cost([4, 3, 2, 1], own.reshape(KERNELS, [1.0] * 4)) <= 48
    assert tree(branches=6).widest(KERNELS).profile == [2, 2, 2, 42]


def test_a_shape_costs_what_its_own_numbers_do_and_is_drawn_with_them():
    numbers = {"groups": 1, "updates": 1, "group_size": 6}
    run = config.validate({**written(tree={"profile": [9, *[2] * 7, 40]}), "train": numbers})
    cost = predict_cost(run, 10)
    assert (cost.rollout, cost.decoded) == (9 + 9 * 9 + 2 * 35 + 40, 63)
    assert draw_tree(tree(profile=[3, 12, 108]).plan(KERNELS[:4], 24, 0, 0), 4)[1:] == [
        "o---o---o",
        "|   |   +108o---*",
        "|   +~12o---o---*",
        "+~3~o---o---o---*",
    ]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"profile": [2, 2]}, r"algorithm\.tree\.profile: \[2, 2\] are 2 numbers of children, and there are 4 stoch"),
        ({"last_step": "sde"}, r"algorithm\.tree\.sample_cost: a child of the last step takes no evaluation"),
    ],
)
def test_shapes_that_cannot_be_are_refused(options, sentence):
    with pytest.raises(InputError, match=f"^{sentence}"):
        tree(**options).plan(KERNELS, 24, 0, 0)


@pytest.mark.parametrize(
    ("axes", "sentence"),
    [
        ({"credit": {"weights": "edges"}}, r"algorithm\.credit: .* and siblings with weights: edges would weigh"),
        ({"credit": "terminal"}, r"algorithm\.credit: .* and terminal would weigh"),
        ({"baseline": "group_mean"}, r"algorithm\.baseline: .* and group_mean would scale"),
        ({"baseline": {"std": "group"}}, r"algorithm\.baseline: .* and leave_one_out with std: group would scale"),
        ({"tree": {"branches": 2}}, r"algorithm\.tree\.branches: "),
        ({"tree": {"profile": [1, 2]}}, r"algorithm\.tree\.profile"),
        ({"tree": {"branches": 7}}, r"train.*24 does not divide by the 7 algorithm\.tree\.branches .* take 21 or 28"),
    ],
)
def test_axes_that_would_turn_the_update_are_refused(axes, sentence):
    with pytest.raises(InputError, match=f"^{sentence}"):
        config.validate(written(**axes))
