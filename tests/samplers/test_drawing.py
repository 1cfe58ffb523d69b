"""Noise of families: each at its address, mixed with what siblings share, drawn at once or by threads."""

import pytest
import torch

from samplers import noise
from samplers.drawing import Ahead, Family, draw

SHAPE = (3, 5)


def source(shape, *address):
    return noise.noise(shape, "test", *address)


FAMILIES = [
    Family([(0, "a"), (0, "b")], (0, "parent"), 2.0, 0.5),
    Family([(1, "a")], None, 1.0, 1.0),
    Family([(1, "b")], (1, "parent"), 0.0, 1.0),
]


@pytest.mark.parametrize("device", [None, "cuda"])
def test_siblings_mix_their_own_noise_with_what_they_share(device):
    if device is None:
        found = draw(FAMILIES, SHAPE, source)
    else:
        ahead = Ahead(source, torch.device(device))
        ahead.begin("these", FAMILIES, SHAPE)
        ahead.begin("others", FAMILIES[1:], SHAPE)
        found = ahead("these")
        assert torch.equal(ahead("others"), found[2:])
    shared, *alone = (source(SHAPE, *address) for address in [(0, "parent"), (1, "a"), (1, "parent")])
    mixed = [(shared + 2 * source(SHAPE, 0, own)) / 5**0.5 * 0.5 for own in "ab"]
    torch.testing.assert_close(found, torch.stack([*mixed, *alone]))


def test_what_fails_in_a_thread_is_raised_where_the_noise_is_asked_for():
    def fails(shape, *address):
        raise ValueError("no noise here")

    ahead = Ahead(fails, torch.device("cuda"))
    ahead.begin("these", FAMILIES, SHAPE)
    with pytest.raises(ValueError, match="no noise here"):
        ahead("these")
