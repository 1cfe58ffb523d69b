"""Split logits into portions of rows, so that no table of all probabilities is in memory."""

from __future__ import annotations

from collections.abc import Iterator

from flowgrpo.schema.imports.heavy import Tensor, torch

CHUNK = 256  # rows on an accelerator: 0.15 GB in float32 for a large vocabulary
CACHED = 2**18  # numbers on a CPU, small enough for its cache


def portions(logits: Tensor) -> Iterator[slice]:
    """Yield slices that cover the rows of logits (N, V)."""
    size = max(1, CACHED // logits.shape[-1]) if logits.device.type == "cpu" else CHUNK
    for first in range(0, len(logits), size):
        yield slice(first, first + size)


def joined(parts: list[Tensor]) -> Tensor:
    """Concatenate the results of all portions, without a copy of a single one."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)
