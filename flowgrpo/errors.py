"""The error of wrong input: one sentence that names the place and the nearest valid choice; exit status 2."""

from __future__ import annotations

from rewards.base import nearest

__all__ = ["InputError", "nearest"]


class InputError(ValueError):
    """What a user wrote is wrong. The message is one clear sentence."""
