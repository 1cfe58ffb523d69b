"""Logits in portions of rows, so that the probabilities of all rows are never in memory at once."""

from __future__ import annotations

from collections.abc import Iterator

from flowgrpo.schema.imports.heavy import Tensor, torch

CHUNK = 256  # rows of a portion on an accelerator: 0.15 GB in float32 for a large vocabulary
CACHED = 2**18  # numbers of a portion on a CPU, few enough for its cache


def portions(logits: Tensor) -> Iterator[slice]:
    """Yield slices that cover the rows of logits (N, V)."""
    size = max(1, CACHED // logits.shape[-1]) if logits.device.type == "cpu" else CHUNK
    for first in range(0, len(logits), size):
        yield slice(first, first + size)


def fine(logits: Tensor) -> Tensor:
    """Return logits in float32, or as they are if they are finer."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def concatenate(parts: list[Tensor]) -> Tensor:
    """Concatenate the results of all portions; a single one is returned without a copy."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)
