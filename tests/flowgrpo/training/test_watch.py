import pytest

from flowgrpo.training.evaluate import overoptimization_streak


@pytest.mark.parametrize(
    ("trained", "watched", "times"),
    [
        ([1, 2, 3, 4], [5, 4, 3, 2], 3),
        ([1, 2, 3, 4], [5, 4, 3, 3], 0),  # the last did not fall
        ([1, 2, 3, 4], [5, 6, 5, 4], 2),
        ([1, 2, 2, 4], [5, 4, 3, 2], 1),  # once the trained one stood still
        ([1, None, 3, 4], [5, 4, 3, 2], 1),
        ([1], [1], 0),
        ([], [], 0),
    ],
)
def test_rewards_part_where_one_rises_and_the_other_falls(trained, watched, times):
    assert overoptimization_streak(trained, watched) == times
