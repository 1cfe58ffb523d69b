import hashlib

import numpy as np
import pytest
import torch

from samplers import noise


def test_the_same_address_gives_the_same_bits_and_another_gives_others():
    address, changes = (0, "edge", 5, 2, (1, 0), 7, 0), (1, "start", 6, 3, (1, 1), 8, 1)
    a = noise.noise((3, 4), *address)
    assert torch.equal(a, noise.noise((3, 4), *address))
    others = [noise.noise((3, 4), *address[:i], new, *address[i + 1 :]) for i, new in enumerate(changes)]
    assert len({tuple(t.flatten().tolist()) for t in [a, *others]}) == 8


def test_addresses_that_read_alike_when_joined_are_different():
    assert noise.seed(1, (2, 3)) != noise.seed((1, 2), 3)
    assert noise.seed(12, 3) != noise.seed(1, 23)


def test_noise_is_standard_normal_and_independent_between_neighbours():
    a, b = (noise.noise((200_000,), 0, "edge", 0, group, (0,), 0, 0) for group in (0, 1))
    assert abs(a.mean().item()) < 0.01
    assert abs(a.std().item() - 1) < 0.01
    assert abs((a * b).mean().item()) < 0.01


def test_seeds_fit_what_torch_takes():
    torch.Generator().manual_seed(max(noise.seed(0, i) for i in range(100)))


@pytest.mark.parametrize(
    "addresses", [[], [(0, "token", 3)], [(0, "token", 3), ((1, "a"), "token", 0), (0, "token", 3)]]
)
def test_uniforms_are_those_of_a_generator_at_each_address(addresses):
    found = noise.uniforms(addresses, 7)
    expected = [noise.generator(*address).random(7) for address in addresses]
    assert found.shape == (len(addresses), 7)
    assert found.dtype == torch.float64
    assert found.tolist() == [each.tolist() for each in expected]


def test_an_address_is_the_key_of_a_philox_generator():
    """So a stored run finds its numbers again in every version: what is written of an address is hashed to 128 bits."""
    key = int.from_bytes(hashlib.blake2b(b"(0, 'edge', (1, 2))", digest_size=16).digest(), "little")
    told = np.random.Generator(np.random.Philox(key=key)).standard_normal(5, dtype=np.float32)
    assert noise.noise((5,), 0, "edge", (1, 2)).tolist() == told.tolist()
