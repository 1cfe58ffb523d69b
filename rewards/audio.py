"""Rewards of audio that need no model."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def loudness(audio: torch.Tensor, prompts: Sequence[str]) -> list[float]:
    """Return the root mean square of waveforms (B, C, N): 0 is silence, 0.707 a full-scale sine, 1 a full-scale square.

    Full scale is -1 to 1; samples beyond it are clipped, as in a file.
    """
    check_audio("loudness", audio)
    return audio.float().clamp(-1, 1).square().mean((1, 2)).sqrt().tolist()


def check_audio(name: str, audio: torch.Tensor) -> None:
    """Raise ValueError if `audio` is not (B, C, N); `name` is the reward in the message."""
    if audio.ndim != 3:
        raise ValueError(f"{name} takes audio (B, C, N), not shape {tuple(audio.shape)}")
