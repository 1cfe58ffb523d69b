"""Gradients are of all processes; what is counted or gathered counts once for those that work on one share."""

from in_shares import exchanged
from pair import pair


def test_shares_count_once_and_processes_each(tmp_path):
    for rank, found in enumerate(pair(exchanged, tmp_path, processes=4)):
        assert found == {
            "sum": [1111.0],
            "sum_shares": [101.0],
            "kept": [10.0**rank],
            "gather": [0, 1, 1, 2, 2, 2, 3, 3, 3, 3],
            "gather_shares": [0, 2, 2, 2],
            "totals": {"a": 4, "b": 10},
        }
