"""Attention backends of diffusers that compute what its own does."""

import typing

import pytest
import torch
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from replayed import policy_of, trained

from flowgrpo.flow.pipeline import attention, backends


@pytest.mark.parametrize("backend", ["_native_math", "_native_flash"])
def test_an_exact_attention_gives_the_same_numbers(backend):
    plain, policy, active = (
        trained(policy_of("flux")),
        policy_of("flux"),
        _AttentionBackendRegistry.get_active_backend(),
    )
    attention.set_attention(policy.modules.values(), backend)
    processors = policy.pipe.transformer.attn_processors.values()
    assert {processor._attention_backend.value for processor in processors} == {backend}
    assert _AttentionBackendRegistry.get_active_backend() == active  # for other models of the process
    numbers, drift, gradients = trained(policy)
    for a, b in zip((*numbers, *gradients), (*plain[0], *plain[2]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert drift == 0.0


def test_attention_names_are_those_of_diffusers_that_do_not_quantise():
    everything = {backend.value for backend in AttentionBackendName}
    assert set(typing.get_args(backends.AttentionBackend)) == {name for name in everything if "sage" not in name}
