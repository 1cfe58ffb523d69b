"""Attention backends of diffusers that compute what its own does."""

import typing
from importlib.util import find_spec
from pathlib import Path

import pytest
import tiny
import torch
from cases import cases
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from replayed import ROWS, policy_of, trained
from torch.nn.attention import SDPBackend, sdpa_kernel

from flowgrpo.cli import main
from flowgrpo.errors import InputError
from flowgrpo.flow.pipeline.networks import attention, attention_backends
from flowgrpo.training.run.run_files import read_metrics

needs_xformers = pytest.mark.skipif(find_spec("xformers") is None, reason="pip install 'flowgrpo[xformers]'")


@pytest.mark.parametrize("backend", cases(["_native_math", "_native_flash"], ["_native_math"]))
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
    assert set(typing.get_args(attention_backends.AttentionBackend)) == {
        name for name in everything if "sage" not in name
    }


@pytest.mark.parametrize(
    ("backend", "device"), [("_native_math", "cpu"), pytest.param("xformers", "cuda", marks=pytest.mark.gpu)]
)
def test_samples_of_another_attention_are_the_same_on_the_device_it_is_for(backend, device):
    if backend == "xformers":
        pytest.importorskip("xformers.ops")
    attention.try_attention(backend, "float32", torch.device(device))
    plain, policy = policy_of("flux"), policy_of("flux")
    for each in (plain, policy):
        each.pipe.to(device)
    attention.set_attention(policy.modules.values(), backend)
    torch.testing.assert_close(policy.generate(ROWS), plain.generate(ROWS), rtol=1e-3, atol=1e-3)


@pytest.mark.usefixtures("cudnn_attention")
def test_cudnn_computes_attention_only_where_it_is_named(monkeypatch):
    """Its backward pass failed on a GPU; no other test sees which kernel PyTorch would take there."""
    policy, allowed = policy_of("flux"), []
    own = torch.nn.functional.scaled_dot_product_attention

    def noting(*given, **named):
        allowed.append(torch.backends.cuda.cudnn_sdp_enabled())
        with sdpa_kernel(SDPBackend.MATH):
            return own(*given, **named)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noting)
    policy.generate(ROWS)
    assert allowed
    assert not any(allowed)
    allowed.clear()
    attention.set_attention(policy.modules.values(), "_native_cudnn")
    policy.generate(ROWS)
    assert any(allowed)  # of the transformer, not of the encoders and the decoder


@pytest.mark.parametrize("learns", [True, False])
def test_xformers_without_a_gpu_is_one_sentence(learns):
    """Whether it is installed or not."""
    with pytest.raises(
        InputError, match=r"^model.attention: xformers computes on a GPU only, and there is none here; "
    ):
        attention.try_attention("xformers", "float32", torch.device("cpu"), learns=learns)


def test_a_package_that_is_missing_is_named():
    with pytest.raises(InputError, match=r"^model.attention: _flash_3 cannot compute in float32 on cpu here .*missing"):
        attention.try_attention("_flash_3", "float32", torch.device("cpu"), learns=False)


@needs_xformers
@pytest.mark.gpu
def test_xformers_trains_a_tiny_flux_without_drift(workplace):
    tiny.PIPELINES["flux"]().save_pretrained("flux")
    call = "{num_inference_steps: 4, height: 16, width: 16, max_sequence_length: 8}"
    assert main(["train", "tiny.yaml", "model.path=flux", f"model.call={call}", "model.attention=xformers"]) == 0
    lines = [line for line in read_metrics(Path("runs/t")) if line["phase"] == "train"]
    assert [line["policy/max_abs_log_ratio"] for line in lines] == [0.0, 0.0]
    assert all(line["policy/grad_norm"] > 0 for line in lines)
