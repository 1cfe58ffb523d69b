"""How many tokens' probabilities over a vocabulary are taken at once: few, so that no table of all of them is made."""

from __future__ import annotations

from collections.abc import Iterator

from flowgrpo.schema.imports.heavy import Tensor, torch

CHUNK = 256  # tokens on an accelerator: of a large vocabulary 0.15 GB in float32
CACHED = 2**18  # numbers on a processor: they stay in its cache from one pass over them to the next


def portions(logits: Tensor) -> Iterator[slice]:
    """Consecutive rows that together are those of logits (N, V), few enough at a time."""
    size = max(1, CACHED // logits.shape[-1]) if logits.device.type == "cpu" else CHUNK
    for first in range(0, len(logits), size):
        yield slice(first, first + size)


def joined(parts: list[Tensor]) -> Tensor:
    """What was found of each portion, in one tensor: a single one is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)
