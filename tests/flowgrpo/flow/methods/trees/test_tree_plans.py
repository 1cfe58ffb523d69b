"""Which steps the trees of the configuration make stochastic, split and train, counted by hand."""

import pytest

from flowgrpo.errors import InputError
from flowgrpo.flow.methods.kernel_options import FlowSDE
from flowgrpo.flow.methods.trees.tree import Branch, BranchWindow, Chain, Pruning, Window
from samplers.kernels import ODE, Kernel
from samplers.trees import TRUNK

SDE = Kernel("flow_sde", 0.7)


def moves(tree, steps=20, group_size=16, seed=0, iteration=0):
    """The one move of each step."""
    plan = tree.plan([SDE] * steps, group_size, seed, iteration)
    found = [plan(TRUNK, step) for step in range(steps)]
    assert all(len(each) == 1 for each in found)
    return [move for (move,) in found]


def stochastic(tree, **options):
    return [step for step, move in enumerate(moves(tree, **options)) if move.kernel != ODE]


def trained(tree, **options):
    return [step for step, move in enumerate(moves(tree, **options)) if move.trained]


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({}, range(9)),
        ({"last_step": "sde"}, range(10)),
        ({"steps": [0, -2]}, range(8)),
        ({"steps": [2, 5]}, range(2, 5)),
        ({"steps": [3, -1]}, range(3, 9)),
    ],
)
def test_a_chain_is_stochastic_and_trained_at_its_steps(options, steps):
    assert stochastic(Chain(**options), steps=10) == trained(Chain(**options), steps=10) == list(steps)


def test_a_fraction_of_a_chain_is_trained_and_all_of_it_stays_stochastic():
    drawn = [tuple(trained(Chain(train_fraction=0.5), steps=11, iteration=i)) for i in range(40)]
    assert {len(steps) for steps in drawn} == {5}
    assert len(set(drawn)) > 20
    assert stochastic(Chain(train_fraction=0.5), steps=11) == list(range(10))
    # Rounded down, to one step at least.
    assert [len(trained(Chain(train_fraction=part), steps=11)) for part in (0.69, 0.7, 0.05)] == [6, 7, 1]


def test_scattered_steps_are_drawn_each_by_itself_in_the_first_half():
    """Flow-DPPO's code trains each of the first five steps with probability 0.6."""
    drawn = [tuple(stochastic(Window(size=3, move="scattered"), steps=10, iteration=i)) for i in range(400)]
    assert {len(steps) for steps in drawn} == {3}
    assert len(set(drawn)) == 10  # all choices of three of five
    for step in range(5):
        assert sum(step in steps for steps in drawn) / 400 == pytest.approx(0.6, abs=0.08)


def test_a_random_window_lies_in_the_first_half_and_a_sliding_one_anywhere():
    first = {tuple(stochastic(Window(size=3), steps=10, iteration=i)) for i in range(60)}
    assert first == {(0, 1, 2), (1, 2, 3), (2, 3, 4)}
    moved = [stochastic(Window(size=3, move="sliding", every=2), steps=6, iteration=i)[0] for i in range(8)]
    assert moved == [0, 0, 1, 1, 2, 2, 2, 2]
    with pytest.raises(InputError, match=r"a window of 6 does not fit .* take at most 5"):
        moves(Window(size=6, move="sliding"), steps=6)


@pytest.mark.parametrize(
    ("group_size", "splits"), [(4, [0, 9]), (8, [0, 4, 9]), (16, [0, 3, 6, 9]), (32, [0, 3, 6, 9]), (6, [0])]
)
def test_a_group_splits_at_most_four_times_over_the_first_half(group_size, splits):
    """2, 4 and so on leaves divide its size: of 32 two roots have 16 each."""
    found = moves(Branch(), group_size=group_size)
    assert [step for step, move in enumerate(found) if move.count > 1] == splits
    assert Branch().roots(group_size) == group_size // 2 ** len(splits)


@pytest.mark.parametrize(
    ("siblings", "strength", "scale"), [("correlated", 4.0, 1.0), ("hot", None, 4.0), ("own", None, 1.0)]
)
def test_siblings_share_noise_have_more_of_it_or_have_their_own(siblings, strength, scale):
    split, single = moves(Branch(siblings=siblings))[:2]
    assert (split.sibling_strength, split.noise_scale) == (strength, scale)
    assert (single.sibling_strength, single.noise_scale) == (None, 1.0)


@pytest.mark.parametrize(
    ("iteration", "first"), [(0, 14), (29, 14), (30, 13), (60, 12), (90, 11), (120, 10), (150, 10), (3000, 10)]
)
def test_a_window_that_moves_earlier_up_to_the_last_split_is_not_trained(iteration, first):
    """The steps 14 to 17 lead to the depths 15 to 18 of 20."""
    tree = Branch(prune=Pruning(rule="depth"))
    assert trained(tree, iteration=iteration) == [*range(first), *range(first + 4, 19)]
    assert stochastic(tree, iteration=iteration) == list(range(19))
    assert [step for step, move in enumerate(moves(tree, iteration=iteration)) if move.count == 2] == [0, 3, 6, 9]


def test_a_branch_with_a_window_is_stochastic_in_it_and_where_it_splits():
    tree = BranchWindow(size=4, every=10, splits=[0, 3])
    assert stochastic(tree, steps=10, group_size=4) == [0, 1, 2, 3]
    assert stochastic(tree, steps=10, group_size=4, iteration=20) == [0, 2, 3, 4, 5]


def test_levels_may_leave_out_a_last_step_by_ode():
    assert [kernel.level for kernel in FlowSDE(level=[0.1, 0.2]).kernels(3)] == [0.1, 0.2, 0.0]
    assert [kernel.level for kernel in FlowSDE(level=[0.1, 0.2, 0.3]).kernels(3)] == [0.1, 0.2, 0.3]
    assert [kernel.level for kernel in FlowSDE(level=0.4).kernels(2, [0.1, 0.2])] == [0.1, 0.2]
    with pytest.raises(InputError, match=r"algorithm\.kernel\.level: 2 levels for 4 steps, take 4, or 3"):
        FlowSDE(level=[0.1, 0.2]).kernels(4)
