"""Rewards of audio that need no model."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def loudness(audio: torch.Tensor, prompts: Sequence[str]) -> list[float]:
    """Return the root mean square of each waveform: 0 is silence, 0.707 a full-scale sine, 1 a full-scale square wave.

    Samples beyond full scale are clipped, as in a file.

    Args:
        audio: float (B, C, N), full scale is -1 to 1.
    """
    check_audio("loudness", audio)
    return audio.float().clamp(-1, 1).square().mean((1, 2)).sqrt().tolist()


def check_audio(name: str, audio: torch.Tensor) -> None:
    """Raise ValueError if `audio` is not (B, C, N); `name` is the reward in the message."""
    if audio.ndim != 3:
        raise ValueError(f"{name} takes audio (B, C, N), not shape {tuple(audio.shape)}")
