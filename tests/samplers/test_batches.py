import torch

from samplers.batches import batched


def test_parts_are_consecutive_and_the_last_one_is_what_is_left():
    assert batched([1, 2, 3, 4, 5], 2) == [[1, 2], [3, 4], [5]]
    assert batched((1, 2), 8) == [(1, 2)]
    assert batched([], 3) == []
    assert [part.tolist() for part in batched(torch.arange(3), 2)] == [[0, 1], [2]]
