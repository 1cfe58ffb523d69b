"""Processes that work on one share of the data agree on it, and one of them scores its samples."""

import torch
from in_shares import told
from pair import pair


def test_processes_of_a_share_have_the_scores_of_the_first_also_of_groups_on_several_shares(tmp_path):
    shares, words, scores, asked = zip(*pair(told, tmp_path, processes=4), strict=True)
    assert shares == ((0, 2, True), (0, 2, False), (1, 2, True), (1, 2, False))
    assert words == ("from 0", "from 0", "from 2", "from 2")
    assert asked == ([2, 1], [], [2], [])
    for first, second in (scores[:2], scores[2:]):
        assert torch.equal(first, second)
    assert [value // 2 * 2 for value in torch.cat([scores[0][:, 0], scores[2][:, 0]]).tolist()] == [0, 0, 0, 2, 2]
    assert scores[0][:, 1].tolist() == [1, 0, 2]  # later samples are darker, and the last is that of the other group
    assert scores[2][:, 1].tolist() == [1, 0]
