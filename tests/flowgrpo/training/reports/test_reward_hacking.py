"""The watch for reward hacking, at made-up evaluations."""

import pytest

from flowgrpo.training.reports.reward_hacking import find_overoptimized, overoptimization_streak


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


def test_the_sentence_names_the_step_the_reward_and_how_often():
    lines = [{"step": step, "phase": "eval", "reward/mean": step, "reward/w/mean": -step} for step in (0, 4, 8)]
    said = "step 8: the reward rose and 'w', which is only watched, fell 2 evaluations in a row"
    assert [sentence.partition(";")[0] for sentence in find_overoptimized(lines, ["w"], 2)] == [said]
    assert find_overoptimized(lines, ["w"], 3) == []
    assert find_overoptimized(lines, ["unknown"], 1) == []
