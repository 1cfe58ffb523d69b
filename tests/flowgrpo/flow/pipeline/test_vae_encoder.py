"""Pictures become the latents that the pipeline decodes to them, whatever it does to its latents before."""

import pytest
import tiny
import torch
from runs import CALL

from flowgrpo.data.prompts import Row
from flowgrpo.errors import InputError
from flowgrpo.flow.pipeline.loading.load import load_policy
from flowgrpo.flow.pipeline.policy import DiffusersPolicy
from flowgrpo.flow.pipeline.vae_encoder import encoder

FLUX = {key: value for key, value in CALL.items() if key != "max_sequence_length"} | {"max_sequence_length": 8}
ROW = Row("a red circle", 0)


def scaled(pipe):
    pipe.vae.register_to_config(scaling_factor=1.7, shift_factor=0.3)
    return pipe


def sd3():
    return DiffusersPolicy(scaled(tiny.sd3()), CALL)


def flux():
    return DiffusersPolicy(scaled(tiny.flux()), FLUX)


def in_half():
    return DiffusersPolicy(scaled(tiny.flux()).to(torch.bfloat16), FLUX)


@pytest.mark.parametrize(("make", "packed"), [(sd3, False), (flux, True)])
def test_latents_are_what_the_encoder_gives_scaled_and_packed_as_the_pipeline_does(make, packed):
    policy = make()
    made = encoder(policy, ROW)
    assert made.size == (16, 16)
    pictures = torch.rand(3, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    (state,) = made.encode(pictures)
    with torch.no_grad():
        expected = (policy.pipe.vae.encode(pictures * 2 - 1).latent_dist.mean - 0.3) * 1.7
    if packed:  # Flux: 2 x 2 pixels of a channel after another are one token
        b, c, h, w = expected.shape
        expected = expected.view(b, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 1, 3, 5).reshape(b, -1, 4 * c)
    torch.testing.assert_close(state, expected, rtol=1e-5, atol=1e-5)
    assert state.shape[1:] == policy.start([ROW])[0].shape[1:]


@pytest.mark.parametrize("make", [sd3, flux])
def test_what_is_decoded_is_what_the_vae_makes_of_the_picture(make):
    policy = make()
    pictures = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    state = encoder(policy, ROW).encode(pictures)
    with torch.no_grad():
        through = policy.pipe.vae(pictures * 2 - 1).sample / 2 + 0.5
    torch.testing.assert_close(policy.decode(state, [ROW] * 2), through.clamp(0, 1), rtol=1e-4, atol=1e-4)


def test_half_precision_finds_the_same_order():
    whole, half = encoder(flux(), ROW), encoder(in_half(), ROW)
    assert torch.equal(whole.order, half.order)
    assert not torch.equal(whole.order, torch.arange(len(whole.order)))
    assert half.encode(torch.rand(1, 3, 16, 16))[0].dtype == half.dtype


def test_the_embedded_model_reconstructs_a_picture():
    policy = load_policy("shapes")
    picture = policy.generate([ROW])
    state = encoder(policy, ROW).encode(picture)
    assert (policy.decode(state, [ROW]) - picture).abs().mean() < 0.02


def test_a_pipeline_without_an_encoder_is_one_sentence():
    policy = sd3()
    policy.pipe.vae = torch.nn.Linear(1, 1)
    with pytest.raises(InputError, match=r"^model\.path: StableDiffusion3Pipeline has no VAE that encodes pictures"):
        encoder(policy, ROW)


def test_a_pipeline_that_mixes_its_latents_is_one_sentence(monkeypatch):
    policy = sd3()
    decode = policy.pipe.vae.decode
    monkeypatch.setattr(policy, "decode", mixing(policy, decode))
    with pytest.raises(InputError, match=r"^model\.path: StableDiffusion3Pipeline mixes its latents"):
        encoder(policy, ROW)


def mixing(policy, decode):
    """The policy's decoding, with a blur before it."""
    real = policy.decode
    return lambda state, rows: real(tuple((x + x.roll(1, -1)) / 2 for x in state), rows)
