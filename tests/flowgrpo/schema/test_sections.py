"""Rows of a call that the run is to find: what may be written for them, and what stands for them until then."""

import pytest

from flowgrpo.errors import InputError
from flowgrpo.schema.sections import Train
from flowgrpo.schema.validation import checked


@pytest.mark.parametrize(
    ("key", "written", "nearest"),
    [
        *[("micro_batch", written, 1) for written in (0, -4, None, True)],
        *[("micro_batch", written, 1048576) for written in (2**20 + 1, 10**30)],
        *[("micro_batch", "atuo", "auto"), ("micro_batch", float("nan"), "auto")],
        *[("rollout_batch", "Auto", "auto"), ("rollout_batch", float("inf"), "auto")],
        *[("rollout_batch", 7.6, 8), ("rollout_batch", [8], 1)],
    ],
)
def test_what_is_no_number_of_rows_is_refused_with_the_nearest(key, written, nearest):
    with pytest.raises(InputError) as raised:
        checked(Train, {key: written}, "train")
    said = f"{written!r} is neither a whole number from 1 to 1,048,576 nor auto, take {nearest}"
    assert str(raised.value) == f"train.{key}: {said}"


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
