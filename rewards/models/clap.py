"""CLAP: the similarity of a sound and its prompt."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from scipy.signal import resample_poly
from torch import nn
from transformers import AutoFeatureExtractor, ClapFeatureExtractor, ClapModel

from rewards.audio import check_audio
from rewards.base import RewardError
from rewards.models.model import ModelReward, encode_unique, pooled_features


class Clap(ModelReward):
    """CLAP: cos(sound, prompt) of a contrastive language-audio model's features (Wu et al., 2211.06687), -1 to 1.

    Channels are averaged and the sound is resampled to the model's rate (48 kHz). transformers takes a random 10 seconds of
    a longer sound; here the score is the mean over the fewest evenly spaced windows of 10 seconds that cover it.

        rewards: [{use: clap, options: {path: laion/clap-htsat-unfused, batch_size: 8}}]

    Args:
        path: a folder or a hub id of a CLAP with its tokenizer and feature extractor.
        batch_size, dtype: of the model; dtype is float32, bfloat16 or float16.
    """

    called = "clap"
    weights = "laion/clap-htsat-unfused"

    @cached_property
    def extractor(self) -> ClapFeatureExtractor:
        """Feature extractor of transformers."""
        with self.loading(self.path):
            return AutoFeatureExtractor.from_pretrained(self.path)

    def __call__(
        self, audio: torch.Tensor, prompts: Sequence[str], sampling_rate: Sequence[int] | None = None
    ) -> list[float]:
        """Return one score per sound, float (B, C, N) in [-1, 1] at `sampling_rate` samples per second."""
        check_audio(self.called, audio)
        if sampling_rate is None:
            raise RewardError("clap needs the column 'sampling_rate', in samples a second")
        return self.score_batches(audio, prompts, sampling_rate).tolist()

    def _load(self) -> nn.Module:
        return self.load_pretrained(ClapModel)

    def _score(self, audio: torch.Tensor, prompts: Sequence[str], sampling_rate: Sequence[int]) -> torch.Tensor:
        mono = audio.float().mean(1).cpu().numpy()
        pieces = [
            split_windows(resample(sound, int(rate), self.extractor.sampling_rate), self.extractor.nb_max_samples)
            for sound, rate in zip(mono, sampling_rate, strict=True)
        ]
        sounds = self._encode([piece for sound in pieces for piece in sound]).float().split([len(p) for p in pieces])
        texts = encode_unique(self.text_features, prompts).float()
        return torch.stack([torch.cosine_similarity(s, t, dim=-1).mean() for s, t in zip(sounds, texts, strict=True)])

    def _encode(self, pieces: list[np.ndarray]) -> torch.Tensor:
        rate = self.extractor.sampling_rate
        inputs = self.extractor(pieces, sampling_rate=rate, return_tensors="pt")["input_features"]
        # The extractor marks a random sound of each batch as longer than a window; here none is.
        longer = torch.zeros(len(pieces), 1, dtype=torch.bool, device=self.device)
        features = inputs.to(self.device, self.dtype)
        return pooled_features(self.model.get_audio_features(input_features=features, is_longer=longer))


def resample(sound: np.ndarray, rate: int, target: int) -> np.ndarray:
    """Resample a sound (N,) from `rate` to `target` samples per second with a polyphase filter."""
    shared = math.gcd(rate, target)
    return resample_poly(sound, target // shared, rate // shared)


def split_windows(sound: np.ndarray, length: int) -> list[np.ndarray]:
    """Return the fewest evenly spaced windows of `length` that cover a sound (N,), or the sound itself if it is shorter."""
    count = max(1, math.ceil(len(sound) / length))
    starts = np.linspace(0, max(0, len(sound) - length), count).round().astype(int)
    return [sound[start : start + length] for start in starts]
