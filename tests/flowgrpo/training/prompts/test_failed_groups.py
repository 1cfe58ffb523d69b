"""Which groups have no success, and by which reward."""

import pytest
import torch

from flowgrpo.errors import InputError
from flowgrpo.training.prompts.failed_groups import check_success, failed_groups


def test_a_group_fails_where_no_answer_reaches_success():
    values = torch.tensor([0.0, 1.0, 0.9, 0.5, torch.nan, torch.nan, 2.0], dtype=torch.float64)
    assert failed_groups(values, [4, 4, 2, 2, 7, 7, 9], 1.0) == [2, 7]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (None, "name the reward that measures success, one of a, b"),
        ("c", "'c' is not one of rewards, choose one of a, b"),
    ],
)
def test_the_deciding_reward_is_named(name, sentence):
    check_success(None, ["a"])
    check_success("b", ["a", "b"])
    with pytest.raises(InputError, match=sentence):
        check_success(name, ["a", "b"])
