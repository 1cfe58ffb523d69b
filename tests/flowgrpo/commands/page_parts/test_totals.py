"""What the gallery shows of several rewards together."""

import pytest
import torch

from flowgrpo.commands.page_parts.totals import Totals
from flowgrpo.training.advantages.reward_combination import Combination

USES = [
    {"use": "shapes", "name": None, "weight": 2.0, "offset": 0.5},
    {"use": "jpeg_size", "name": "small", "weight": 0.5},
]
BOUNDED = [
    {"use": "shapes", "name": None, "weight": 2.0, "offset": 0.5},
    {"use": "hpsv2", "name": None, "weight": -1.0},
    {"use": "pickscore", "name": None, "weight": 0.5, "offset": 16.0},
]


def of(form, uses=USES):
    return Totals.of({"rewards": uses, "algorithm": {"baseline": {"combine": form, "caution": 0.5}}})


@pytest.mark.parametrize(
    ("form", "expected"), [("sum", 1.0 - 2.0), ("decoupled", -1.0), ("worst", -2.0), ("cautious", -0.5 - 0.5 * 2.25)]
)
def test_a_total_is_that_of_the_run(form, expected):
    """The members are 2 x (1 - 0.5) and 0.5 x -4: 1 and -2, of mean -0.5 and variance 2.25."""
    assert of(form).total({"shapes": 1.0, "small": -4.0, "watched": 100.0}) == pytest.approx(expected)


def test_what_is_not_known_leaves_the_total_and_without_a_run_the_sum_of_all_counts():
    assert of("worst").total({"shapes": 1.0, "small": None}) == 1
    assert of("sum").total({"shapes": None, "small": None}) is None
    assert of("sum").total({"watched": 1.0}) is None
    assert Totals.of({}).total({"a": 1.0, "b": 2.5, "c": None}) == 3.5
    assert Totals.of({}).total({"a": None}) is None
    assert Totals.of({}).total_bounds({"a": 1.0}) is None


def test_bounds_are_those_of_the_members():
    """2 x (0 to 1 - 0.5), -1 x (-1 to 1), 0.5 x (16 to 26 - 16)."""
    rewards = {"shapes": 0.5, "hpsv2": 0.1, "pickscore": 20.0}
    assert of("sum", BOUNDED).total_bounds(rewards) == (-2, 7)
    assert of("worst", BOUNDED).total_bounds(rewards) == (-1, 1)
    assert of("cautious", BOUNDED).total_bounds(rewards) is None
    assert of("worst", BOUNDED).total_bounds({**rewards, "shapes": None, "hpsv2": None}) == (0, 5)
    assert of("sum").total_bounds({"shapes": 1.0, "small": -4.0}) is None  # of a size nobody has stated any


@pytest.mark.parametrize("form", ["sum", "per_reward", "decoupled", "worst", "cautious"])
def test_a_total_is_what_the_training_makes_of_the_same_rewards(form):
    values = torch.randn(20, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    values[0, 1] = values[1] = torch.nan
    scale, offset = torch.tensor([[2.0, 0.5], [0.5, 0.0]], dtype=torch.float64)
    of_batch = Combination(form, 0.5, scale, offset).total(values).tolist()
    rows = [{"shapes": a, "small": b} for a, b in values.tolist()]
    known = [{name: value if value == value else None for name, value in row.items()} for row in rows]
    totals = [of(form).total(row) for row in known]
    assert totals[1] is None
    assert of_batch[1] != of_batch[1]
    assert totals[:1] + totals[2:] == pytest.approx(of_batch[:1] + of_batch[2:])
