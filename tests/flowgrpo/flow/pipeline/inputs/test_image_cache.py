"""Pictures of a condition are encoded once: the same numbers as where each call encodes them, also of other pictures."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import tiny
import torch
from zoo import SPECIMENS

from flowgrpo.flow.pipeline.inputs import call_cache
from flowgrpo.flow.pipeline.inputs.image_cache import EncodedPictures
from flowgrpo.flow.pipeline.inputs.prompt_embeddings import fingerprint
from flowgrpo.flow.pipeline.policy import DiffusersPolicy

NAMES = ["QwenImageEditPlusPipeline", "Flux2KleinPipeline (edit)", "LTXImageToVideoPipeline", "FluxFillPipeline"]


def counting(vae):
    """Notes each picture that a VAE encodes."""
    calls, encode = [], vae.encode
    vae.encode = lambda x, *args, **kwargs: calls.append(x) or encode(x, *args, **kwargs)
    return calls


def walked(name, monkeypatch, *, each):
    """States and velocities of two steps of a row, and how often its VAE encoded; in each call if so asked."""
    specimen = SPECIMENS[name]
    policy = DiffusersPolicy(specimen.build(), specimen.call)
    if each:
        monkeypatch.setattr(policy.walk.pictures, "at_hand", nullcontext)
    calls, row = counting(policy.pipe.vae), [specimen.rows[0]]
    with torch.no_grad():
        state = policy.start(row)
        before = len(calls)
        found = [*state, *(x for sigma in policy.sigmas[:2] for x in policy.velocity(state, sigma, row))]
    return found, before, len(calls) - before


@pytest.mark.usefixtures("small_pictures")
@pytest.mark.parametrize("name", NAMES)
def test_a_step_encodes_no_picture_that_the_start_did(name, monkeypatch):
    often, first, further = walked(name, monkeypatch, each=True)
    assert further >= 2
    once, started, none = walked(name, monkeypatch, each=False)
    assert (none, 0 < started < first) == (0, True)
    assert all(torch.equal(a, b) for a, b in zip(often, once, strict=True))


def pipe_of(vae):
    return SimpleNamespace(vae=vae, components={"vae": vae})


@pytest.fixture
def vae():
    torch.manual_seed(0)
    return tiny.autoencoder(4).requires_grad_(False)


def test_other_bytes_another_type_or_tiles_are_encoded_anew(vae):
    calls, kept = counting(vae), EncodedPictures(pipe_of(vae))
    picture = torch.rand(1, 3, 16, 16)
    encode = vae.encode
    with kept.at_hand():
        first = vae.encode(picture).latent_dist
        first.mode().zero_()  # as a pipeline may
        again = vae.encode(picture.clone()).latent_dist
        assert len(calls) == 1
        vae.encode(picture + 1)
        vae.encode(picture, return_dict=False)
        vae.use_slicing = True
        vae.encode(picture)
        vae.double().encode(picture.double())
    assert len(calls) == 5
    assert vae.encode is encode
    assert torch.equal(again.mode(), vae.float().encode(picture).latent_dist.mode())
    draws = [again.sample(torch.Generator().manual_seed(seed)) for seed in (1, 2)]
    assert not torch.equal(*draws)


def test_the_encodings_that_were_asked_for_last_stay(vae, monkeypatch):
    calls, kept = counting(vae), EncodedPictures(pipe_of(vae))
    pictures_of = [torch.full((1, 3, 16, 16), float(i)) for i in range(3)]
    with kept.at_hand():
        vae.encode(pictures_of[0])
        ((_, size),) = kept._encodings._results.values()
        monkeypatch.setattr(call_cache, "KEPT", 2 * size)
        for i in (1, 0, 2, 0, 1):
            vae.encode(pictures_of[i])
        assert len(calls) == 4  # the second went as the third came
        large = torch.zeros(1, 3, 32, 32)  # four times as much
        for picture in (large, large, pictures_of[0], pictures_of[1]):
            vae.encode(picture)
        assert len(calls) == 6  # what has no room by itself takes none from others


def test_what_fails_leaves_the_vae_as_it_was(vae):
    kept = EncodedPictures(pipe_of(vae))
    with pytest.raises(ValueError, match="not enough values"), kept.at_hand():
        vae.encode(torch.zeros(1))
    assert "encode" not in vars(vae)
    with EncodedPictures(SimpleNamespace(components={})).at_hand():  # a pipeline without a VAE
        pass


def test_pictures_are_told_apart_by_their_bytes_however_they_lie_in_memory():
    dot = torch.rand(1, 1, 1, 3).permute(0, 3, 1, 2)  # whose last stride is 3, though it counts as contiguous
    assert fingerprint(dot) == fingerprint(dot.clone(memory_format=torch.contiguous_format).reshape(1, 3, 1, 1))
    assert fingerprint(dot) != fingerprint(dot + 1)
    wide = torch.rand(1, 4, 5, 3).permute(0, 3, 1, 2)
    assert fingerprint(wide) == fingerprint(wide.contiguous()) != fingerprint(wide.contiguous().flip(-1))
    assert fingerprint(torch.tensor(1.0)) != fingerprint(torch.tensor(2.0))
