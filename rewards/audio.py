"""Videos with soundtracks, and rewards of audio that need no model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Films:
    """Videos with soundtracks: frames (B, F, 3, H, W) in [0, 1], and sound (B, C, N) in [-1, 1]; a single one has no B.

    An index, `cpu` and `flip` work on both tensors.
    """

    frames: torch.Tensor
    soundtrack: torch.Tensor

    def __len__(self) -> int:
        return len(self.frames)

    def __getitem__(self, index: Any) -> Films:
        return self._map(lambda part: part[index])

    def __iter__(self) -> Iterator[Films]:
        return map(Films, self.frames, self.soundtrack)

    def cpu(self) -> Films:
        """Return them on the CPU."""
        return self._map(torch.Tensor.cpu)

    def flip(self, dim: int) -> Films:
        """Return them in the reverse order along a dimension."""
        return self._map(lambda part: part.flip(dim))

    def _map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Films:
        return Films(function(self.frames), function(self.soundtrack))


def tensors(samples: torch.Tensor | Films) -> tuple[torch.Tensor, ...]:
    """Return the tensors of samples: their values, or frames and soundtracks."""
    return (samples.frames, samples.soundtrack) if isinstance(samples, Films) else (samples,)


def join_samples(parts: Sequence[Any]) -> Any:
    """Return parts of a batch of samples, all tensors or all `Films`, as one batch."""
    columns = [torch.cat(column) for column in zip(*map(tensors, parts), strict=True)]
    return Films(*columns) if len(columns) > 1 else columns[0]


def loudness(audio: torch.Tensor, prompts: Sequence[str]) -> list[float]:
    """Return the root mean square of waveforms (B, C, N): 0 is silence, 0.707 a full-scale sine, 1 a full-scale square.

    Full scale is -1 to 1; samples beyond it are clipped, as in a file.
    """
    check_audio("loudness", audio)
    return audio.float().clamp(-1, 1).square().mean((1, 2)).sqrt().tolist()


def check_audio(name: str, audio: torch.Tensor) -> None:
    """Raise ValueError if `audio` is not (B, C, N); `name` is the reward in the message."""
    if audio.ndim != 3:
        hint = "; of: soundtrack scores the sound of videos that have one" if audio.ndim == 5 else ""
        raise ValueError(f"{name} takes audio (B, C, N), not shape {tuple(audio.shape)}{hint}")
