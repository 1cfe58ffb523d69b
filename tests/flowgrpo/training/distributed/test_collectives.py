"""Gradients are of all processes; what is counted, gathered or scored is of one for those that work on one share."""

import pytest
import torch
from in_shares import exchanged, told
from in_turn import each_in_turn


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    functions = {"exchanged": exchanged, "told": told}
    return each_in_turn(functions, tmp_path_factory.mktemp("four"), processes=4)


def test_shares_count_once_and_processes_each(answers):
    for rank, found in enumerate(answers["exchanged"]):
        assert found == {
            "sum": [1111.0],
            "sum_shards": [101.0],
            "kept": [10.0**rank],
            "gather": [0, 1, 1, 2, 2, 2, 3, 3, 3, 3],
            "gather_shards": [0, 2, 2, 2],
            "totals": {"a": 4, "b": 10},
        }


def test_processes_of_a_share_have_the_scores_of_the_first_also_of_groups_on_several_shares(answers):
    shares, words, scores, asked = zip(*answers["told"], strict=True)
    assert shares == ((0, 2, True), (0, 2, False), (1, 2, True), (1, 2, False))
    assert words == ("from 0", "from 0", "from 2", "from 2")
    assert asked == ([2, 1], [], [2], [])
    for first, second in (scores[:2], scores[2:]):
        assert torch.equal(first, second)
    assert [value // 2 * 2 for value in torch.cat([scores[0][:, 0], scores[2][:, 0]]).tolist()] == [0, 0, 0, 2, 2]
    assert scores[0][:, 1].tolist() == [1, 0, 2]  # later samples are darker, and the last is that of the other group
    assert scores[2][:, 1].tolist() == [1, 0]
