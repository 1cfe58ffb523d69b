"""What tests of several modules for flows use."""

import functools

import pytest

from samplers import noise


@pytest.fixture(scope="module")
def noise_drawn_once():
    """Noise is a function of its address, of which presets have many in common."""
    drawn = functools.cache(noise.noise)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(noise, "noise", lambda *address: drawn(*address).clone())
        yield
