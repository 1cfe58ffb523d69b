"""Rows of a call that the run is to find: what may be written for them, and what stands for them until then."""

import pytest

from flowgrpo.errors import InputError
from flowgrpo.schema.sections import Train
from flowgrpo.schema.sentences import checked


@pytest.mark.parametrize(
    ("key", "written", "end"),
    [
        ("micro_batch", 0, "0 is neither a whole number from 1 to 1,048,576 nor auto, take 1"),
        ("micro_batch", -4, "-4 is neither a whole number from 1 to 1,048,576 nor auto, take 1"),
        ("micro_batch", 2**20 + 1, "1048577 is neither a whole number from 1 to 1,048,576 nor auto, take 1048576"),
        ("micro_batch", "atuo", "'atuo' is neither a whole number from 1 to 1,048,576 nor auto, take auto"),
        ("micro_batch", None, "None is neither a whole number from 1 to 1,048,576 nor auto, take 1"),
        ("micro_batch", True, "True is neither a whole number from 1 to 1,048,576 nor auto, take 1"),
        ("rollout_batch", 7.6, "7.6 is neither a whole number from 1 to 1,048,576 nor auto, take 8"),
        ("rollout_batch", "Auto", "'Auto' is neither a whole number from 1 to 1,048,576 nor auto, take auto"),
        ("rollout_batch", [8], "[8] is neither a whole number from 1 to 1,048,576 nor auto, take 1"),
        ("rollout_batch", float("inf"), "inf is neither a whole number from 1 to 1,048,576 nor auto, take auto"),
        ("micro_batch", float("nan"), "nan is neither a whole number from 1 to 1,048,576 nor auto, take auto"),
        ("micro_batch", 10**30, f"{10**30} is neither a whole number from 1 to 1,048,576 nor auto, take 1048576"),
    ],
)
def test_what_is_no_number_of_rows_is_refused_with_the_nearest(key, written, end):
    with pytest.raises(InputError) as raised:
        checked(Train, {key: written}, "train")
    assert str(raised.value) == f"train.{key}: {end}"


@pytest.mark.parametrize(
    ("written", "update", "rollout", "found"),
    [
        ({"micro_batch": 5}, 5, 5, ()),
        ({"micro_batch": 5, "rollout_batch": 9}, 5, 9, ()),
        ({"micro_batch": "auto"}, 32, 32, ("micro_batch",)),
        ({"micro_batch": "auto", "rollout_batch": 9}, 32, 9, ("micro_batch",)),
        ({"micro_batch": 5, "rollout_batch": "auto"}, 5, 32, ("rollout_batch",)),
        ({"micro_batch": "auto", "rollout_batch": "auto"}, 32, 32, ("micro_batch", "rollout_batch")),
    ],
)
def test_until_rows_are_found_the_most_that_are_tried_stand_for_them(written, update, rollout, found):
    """4 groups of 24 in 2 parts are 48 samples a part, of which 32 is the last power of two."""
    train = Train(groups=4, group_size=24, updates=2, **written)
    assert (train.update_rows, train.rollout_rows, train.found) == (update, rollout, found)


@pytest.mark.parametrize(
    ("groups", "size", "updates", "most"), [(1, 2, 4, 1), (1, 2, 2, 1), (1, 2, 1, 2), (8, 16, 2, 64)]
)
def test_no_more_rows_are_tried_than_a_part_has(groups, size, updates, most):
    assert Train(groups=groups, group_size=size, updates=updates).most_rows == most
    edges = Train(groups=groups, group_size=size, updates=updates, split="edges")  # dealt when all have run
    assert edges.most_rows == Train(groups=groups, group_size=size, updates=1).most_rows
