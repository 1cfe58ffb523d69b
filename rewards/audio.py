"""Rewards of audio that need no model."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def loudness(audio: torch.Tensor, prompts: Sequence[str]) -> list[float]:
    """The root mean square of a waveform, linear: 0 is silence, 0.707 a sine of full scale, 1 a square wave of full scale.

    What lies beyond full scale counts as full scale, as it does in a file.

    Args:
        audio: float (B, C, N), full scale is -1 to 1.

    Raises:
        ValueError: this is not audio.
    """
    check_audio("loudness", audio)
    return audio.float().clamp(-1, 1).square().mean((1, 2)).sqrt().tolist()


def check_audio(name: str, audio: torch.Tensor) -> None:
    """Refuse images, videos and whatever else is not a batch of audio, in the name of a reward."""
    if audio.ndim != 3:
        raise ValueError(f"{name} takes audio (B, C, N), not shape {tuple(audio.shape)}")
