"""How a process of a run knows that another one has gone."""

from __future__ import annotations

import os

# What gloo and NCCL say of a process that has gone, in a RuntimeError.
GONE = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "remote process exited",
    "Failed to recv",
    "failed to recv",
)


def is_lost(error: BaseException) -> bool:
    """Whether an error says that another process of this run has gone; whoever raised it failed in nothing."""
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    return several and isinstance(error, RuntimeError) and any(words in str(error) for words in GONE)
