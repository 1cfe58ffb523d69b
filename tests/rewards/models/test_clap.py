import math

import numpy as np
import pytest
import tiny_rewards
import torch
from transformers import AutoTokenizer, ClapFeatureExtractor, ClapModel

import rewards
from rewards import RewardError
from rewards.models.clap import resample, split_windows

RATE = tiny_rewards.CLAP_RATE  # a second is all that the tiny model hears at a time


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_rewards.save_clap(tmp_path_factory.mktemp("clap"))


@pytest.fixture(scope="module")
def reward(folder):
    return rewards.load("clap", options={"path": str(folder)})


def score(reward, sounds, prompts=None, rate=RATE):
    return reward(sounds, prompts or ["dog barks"] * len(sounds), {"sampling_rate": [rate] * len(sounds)})


def sine(pitch, seconds, rate=RATE):
    return torch.sin(2 * math.pi * pitch * torch.arange(int(seconds * rate)) / rate)


def test_a_sound_scores_the_cosine_that_transformers_gives(folder, reward):
    noise = torch.randn(RATE, generator=torch.Generator().manual_seed(0))
    sounds = torch.stack([sine(300, 1), sine(1200, 1) * 0.1, noise])
    prompts = ["dog barks", "two dog", "a red circle of two dog"]
    tokens = AutoTokenizer.from_pretrained(folder)(prompts, padding=True, return_tensors="pt")
    heard = ClapFeatureExtractor.from_pretrained(folder)(list(sounds.numpy()), sampling_rate=RATE, return_tensors="pt")
    model = ClapModel.from_pretrained(folder).eval()
    output = model(input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"], **heard)
    expected = (output.logits_per_audio / model.logit_scale_a.exp()).diagonal().detach()
    found = score(reward, sounds[:, None], prompts)
    torch.testing.assert_close(found.float(), expected, atol=1e-5, rtol=1e-4)
    stereo = torch.stack([sounds * 1.5, sounds * 0.5], 1)
    torch.testing.assert_close(score(reward, stereo, prompts), found, atol=1e-5, rtol=1e-4)


def chord(tilt, rate):
    """0.7 seconds of a tone every 40 Hz up to 3.6 kHz, `tilt` times louder from each to the next."""
    return sum(tilt**i * sine(40 * (i + 1), 0.7, rate).roll(37 * i) for i in range(90)) * 0.02


@pytest.mark.parametrize("rate", [4 * RATE, 11025, 2 * RATE])
def test_the_same_sound_scores_nearly_the_same_at_any_rate(reward, rate):
    chords = {r: torch.stack([chord(tilt, r) for tilt in (0.95, 1.0, 1.05)])[:, None] for r in (RATE, rate)}
    own, other = (score(reward, sounds, rate=r) for r, sounds in chords.items())
    assert (own - other).abs().max() < 0.1 * (own.max() - own.min()), (own, other)


def test_a_tone_keeps_its_pitch_and_height_when_resampled():
    found = resample(sine(440, 0.5, 44100).numpy(), 44100, 48000)
    middle = slice(2000, 22000)  # the ends ring
    np.testing.assert_allclose(found[middle], sine(440, 0.5, 48000).numpy()[middle], atol=2e-3)


def test_a_long_sound_is_heard_whole_and_always_alike(reward):
    second = torch.randn(RATE, generator=torch.Generator().manual_seed(0)) * 0.2
    once, thrice, tone, both = (
        score(reward, sound[None, None])
        for sound in (second, second.repeat(3), sine(440, 1), torch.cat([second, sine(440, 1)]))
    )
    torch.testing.assert_close(once, thrice, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(both, (once + tone) / 2, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("samples", "starts"),
    [(4, [0]), (10, [0]), (11, [0, 1]), (20, [0, 10]), (25, [0, 8, 15]), (30, [0, 10, 20])],
)
def test_stretches_cover_a_sound_evenly(samples, starts):
    found = split_windows(np.arange(samples), 10)
    assert [part[0] for part in found] == starts
    assert set(np.concatenate(found)) == set(range(samples))
    assert all(len(part) == min(10, samples) for part in found)


def test_a_model_that_fuses_gives_each_sound_one_score_too(tmp_path):
    reward = rewards.load("clap", options={"path": str(tiny_rewards.save_clap(tmp_path, fusion=True))})
    sounds = torch.randn(3, 1, RATE, generator=torch.Generator().manual_seed(0))
    together, alone = score(reward, sounds), torch.cat([score(reward, sound[None]) for sound in sounds])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-4)


def test_what_is_no_sound_or_has_no_rate_is_refused(reward):
    with pytest.raises(ValueError, match=r"clap takes audio \(B, C, N\), not shape"):
        score(reward, torch.zeros(1, 3, 8, 8))
    with pytest.raises(RewardError, match="clap needs the column 'sampling_rate'"):
        reward(torch.zeros(1, 1, 800), ["a"], {})
