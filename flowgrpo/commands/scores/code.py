"""The code of a user's own reward, by which one that was edited is noticed."""

from __future__ import annotations

import inspect
from pathlib import Path

from rewards.base import find


def code_of(use: str) -> bytes | None:
    """Return the file of a reward that a config names by `use`, or its function or class.

    None for a reward of this package, of an installed package or of a server, and if there is no source. Raise
    RewardError if there is no such reward.
    """
    place = use if use.endswith(".py") else use.rpartition(":")[0]  # a file, a module, or nothing
    if not place or "://" in use:
        return None
    reward = find(use)
    if place.endswith(".py"):
        return Path(place).read_bytes()
    known = inspect.isroutine(reward) or inspect.isclass(reward)
    try:
        return inspect.getsource(reward if known else type(reward)).encode()
    except (OSError, TypeError):  # such as of a compiled module
        return None
