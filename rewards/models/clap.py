"""CLAP: how well a sound fits its prompt."""

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
    """CLAP: cos(sound, prompt) of the features of a contrastive language-audio model (Wu et al., 2211.06687), -1 to 1.

    Channels are averaged and the sound is resampled to the model's rate (48 kHz). Of a sound beyond 10 seconds transformers
    hears 10 at random; here its score is the mean over the fewest stretches of 10 seconds that cover it, evenly spread.

        rewards: [{use: clap, options: {path: laion/clap-htsat-unfused, batch_size: 8}}]

    Args:
        path: a CLAP with its tokenizer and feature extractor: a folder or a hub id.
        batch_size: sounds at a time.
        dtype: float32, bfloat16 or float16.
    """

    called = "clap"
    weights = "laion/clap-htsat-unfused"

    @cached_property
    def extractor(self) -> ClapFeatureExtractor:
        """Transformers' feature extractor beside the weights."""
        with self.loading(self.path):
            return AutoFeatureExtractor.from_pretrained(self.path)

    def __call__(
        self, audio: torch.Tensor, prompts: Sequence[str], sampling_rate: Sequence[int] | None = None
    ) -> list[float]:
        """One score per sound, float (B, C, N), full scale -1 to 1, of `sampling_rate` samples a second, and prompt.

        Raises:
            RewardError: the sampling rate is not given.
        """
        check_audio(self.called, audio)
        if sampling_rate is None:
            raise RewardError("clap needs the column 'sampling_rate', in samples a second")
        return self.batched(audio, prompts, sampling_rate).tolist()

    def _load(self) -> nn.Module:
        return self.pretrained(ClapModel)

    def _score(self, audio: torch.Tensor, prompts: Sequence[str], sampling_rate: Sequence[int]) -> torch.Tensor:
        mono = audio.float().mean(1).cpu().numpy()
        pieces = [
            stretches(resampled(sound, int(rate), self.extractor.sampling_rate), self.extractor.nb_max_samples)
            for sound, rate in zip(mono, sampling_rate, strict=True)
        ]
        heard = self._hear([piece for sound in pieces for piece in sound]).float().split([len(p) for p in pieces])
        read = encode_unique(self.text_features, prompts).float()
        return torch.stack([torch.cosine_similarity(h, r, dim=-1).mean() for h, r in zip(heard, read, strict=True)])

    def _hear(self, pieces: list[np.ndarray]) -> torch.Tensor:
        rate = self.extractor.sampling_rate
        heard = self.extractor(pieces, sampling_rate=rate, return_tensors="pt")["input_features"]
        # The extractor calls one sound of a batch "longer" by lot; none is.
        longer = torch.zeros(len(pieces), 1, dtype=torch.bool, device=self.device)
        features = heard.to(self.device, self.dtype)
        return pooled_features(self.model.get_audio_features(input_features=features, is_longer=longer))


def resampled(sound: np.ndarray, rate: int, target: int) -> np.ndarray:
    """A sound (N,) of `rate` samples a second at `target`, by a polyphase filter."""
    shared = math.gcd(rate, target)
    return resample_poly(sound, target // shared, rate // shared)


def stretches(sound: np.ndarray, length: int) -> list[np.ndarray]:
    """The fewest stretches of `length` that cover a sound (N,), evenly spread; the sound itself if it is shorter."""
    count = max(1, math.ceil(len(sound) / length))
    starts = np.linspace(0, max(0, len(sound) - length), count).round().astype(int)
    return [sound[start : start + length] for start in starts]
