"""Switches that save memory or time change no number."""

import json

import pytest
import tiny
import torch
from cases import cases
from diffusers import TransformerTemporalModel
from diffusers.hooks import apply_group_offloading
from replayed import policy_of, trained

from flowgrpo import config
from flowgrpo.commands.runs import train as run
from flowgrpo.errors import InputError
from flowgrpo.flow.pipeline.networks import switches


def blocks_computed(policy, computed):
    """Note every forward of the first transformer block."""
    block = next(iter(policy.pipe.transformer.transformer_blocks))
    block.register_forward_pre_hook(lambda *_: computed.append(torch.is_grad_enabled()))


@pytest.mark.parametrize("name", cases(("sd3_guided", "flux"), ("flux",)))
def test_checkpointing_changes_no_number(name):
    plain, policy, computed = trained(policy_of(name)), policy_of(name), []
    switches.checkpoint_gradients(policy.modules.values())
    blocks_computed(policy, computed)
    numbers, drift, gradients = trained(policy)
    assert all(torch.equal(a, b) for a, b in zip(numbers, plain[0], strict=True))
    assert drift == 0.0
    for a, b in zip(gradients, plain[2], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    assert computed.count(True) == 2 * 3  # three replays, each computed again on the way back


@pytest.mark.parametrize("name", cases(("sd3", "flux"), ("sd3",)))
def test_an_offloaded_vae_computes_the_same(name):
    plain, policy = trained(policy_of(name)), policy_of(name)
    before = policy.pipe.vae.config, policy.pipe.vae.dtype, policy.pipe.device
    switches.offload(policy.pipe.vae, policy.pipe.device)
    numbers, drift, _ = trained(policy)
    assert all(torch.equal(a, b) for a, b in zip(numbers, plain[0], strict=True))
    assert drift == 0.0
    assert (policy.pipe.vae.config, policy.pipe.vae.dtype, policy.pipe.device) == before
    picture = torch.rand(1, 3, 16, 16)
    own, stock = (pipe.vae.encode(picture).latent_dist.mean for pipe in (policy.pipe, tiny.PIPELINES[name]()))
    assert torch.equal(own, stock)


def test_an_offloaded_vae_visits_the_device_for_its_calls_only(monkeypatch):
    vae, journeys = tiny.autoencoder(4), []
    monkeypatch.setattr(vae, "to", lambda device: journeys.append(torch.device(device).type))
    monkeypatch.setattr(vae, "decode", lambda latents: journeys.append("decode") or latents)
    monkeypatch.setattr(vae, "encode", lambda picture: 1 / 0)
    switches.offload(vae, torch.device("cuda"))
    assert journeys == ["cpu"]
    vae.decode(torch.zeros(1))
    assert journeys == ["cpu", "cuda", "decode", "cpu"]
    with pytest.raises(ZeroDivisionError):
        vae.encode(torch.zeros(1))
    assert journeys[-1] == "cpu"


def test_a_vae_that_the_device_has_no_room_for_stays_where_it_was(monkeypatch):
    """Not a part of it there and a part here."""
    vae, journeys = tiny.autoencoder(4), []

    def to(device):
        journeys.append(torch.device(device).type)
        if journeys[-1] == "cuda":
            raise torch.OutOfMemoryError

    monkeypatch.setattr(vae, "to", to)
    switches.offload(vae, torch.device("cuda"))
    with pytest.raises(torch.OutOfMemoryError):
        vae.decode(torch.zeros(1))
    assert journeys == ["cpu", "cuda", "cpu"]


def test_tiling_changes_pictures_and_nothing_else():
    policies = [policy_of("sd3"), policy_of("sd3")]
    for policy in policies:
        policy.pipe.vae.tile_latent_min_size, policy.pipe.vae.tile_sample_min_size = 4, 8
    switches.tile(policies[1].pipe)
    (plain, _, _), (tiled, drift, _) = map(trained, policies)
    assert torch.equal(plain[0], tiled[0])
    assert torch.equal(plain[1], tiled[1])
    assert drift == 0.0
    assert not torch.equal(plain[2], tiled[2])


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "model.attention=sage",
            "model.attention: 'sage' quantises, so the log-probs of a rollout would not be the model's; ",
        ),
        ("model.attention=_sage_qk_int8_pv_fp16_cuda", "model.attention: '_sage_qk_int8_pv_fp16_cuda' quantises"),
        ("model.attention=_native_mth", "model.attention: '_native_mth' is not allowed, did you mean '_native_math'?"),
        ("model.guidance=non", "model.guidance: 'non' is not allowed, did you mean 'none'?"),
        ("model.compile=autp", "model.compile: 'autp' is not allowed, did you mean 'auto'?"),
        ("model.vae=free", "model.vae: 'free' is not allowed, choose one of keep, offload"),
        (
            "model.gradient_checkpoint=true",
            "model.gradient_checkpoint: unknown key, did you mean 'gradient_checkpointing'?",
        ),
    ],
)
def test_a_wrong_switch_is_refused_in_the_config(workplace, override, said):
    with pytest.raises(InputError) as caught:
        config.load("tiny.yaml", [override])
    assert str(caught.value).startswith(said)


def test_a_pipeline_looks_for_its_device_when_a_component_has_come_or_moved(monkeypatch):
    pipe, asked = tiny.sd3(), []
    kind = type(pipe)
    found = kind._execution_device
    monkeypatch.setattr(kind, "_execution_device", property(lambda self: asked.append(1) or found.fget(self)))
    switches.remember_device(pipe)
    switches.remember_device(pipe)
    assert type(pipe).__bases__ == (kind,)
    assert type(pipe).__name__ == kind.__name__
    changes = [
        lambda: None,
        lambda: setattr(pipe, "transformer", tiny.sd3().transformer),
        lambda: setattr(pipe, "text_encoder", None),
        lambda: pipe.vae.to("meta"),
        lambda: apply_group_offloading(pipe.transformer, torch.device("cpu"), offload_type="leaf_level"),
    ]
    for times, change in enumerate(changes, 1):
        change()
        assert {pipe._execution_device for _ in range(3)} == {torch.device("cpu")}
        assert len(asked) == times


def test_networks_without_what_a_switch_needs_are_refused():
    with pytest.raises(
        InputError, match="gradient_checkpointing: TransformerTemporalModel does not support it, set it to false"
    ):
        switches.checkpoint_gradients(
            [TransformerTemporalModel(num_attention_heads=1, attention_head_dim=32, in_channels=32)]
        )
    pipe = tiny.sd3()
    del pipe.vae.use_tiling
    with pytest.raises(InputError, match="model.vae_tiling: AutoencoderKL has no tiling"):
        switches.tile(pipe)


def test_a_run_with_the_exact_switches_is_the_plain_run(workplace, finished):
    chosen = {"model.gradient_checkpointing": True, "model.vae": "offload", "model.vae_tiling": True}
    switched = run.train("tiny.yaml", chosen)
    assert switched.policy.pipe.transformer.gradient_checkpointing
    assert switched.policy.pipe.vae.use_tiling
    lines = (finished / "runs" / "t" / "metrics.jsonl").read_text().splitlines()
    for a, b in zip(map(json.loads, lines), switched.metrics, strict=True):
        assert a["reward/mean"] == b["reward/mean"]
        if a["phase"] == "train":
            assert a["policy/grad_norm"] == pytest.approx(b["policy/grad_norm"], rel=1e-6)
            assert a["policy/max_abs_log_ratio"] == b["policy/max_abs_log_ratio"] == 0.0
