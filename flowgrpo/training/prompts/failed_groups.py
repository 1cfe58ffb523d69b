"""Groups without a success, which hints may help."""

from __future__ import annotations

from collections.abc import Sequence

from flowgrpo.errors import InputError
from flowgrpo.schema.imports.heavy import Tensor
from rewards.base import nearest


def failed_groups(values: Tensor, groups: Sequence[int], success: float) -> list[int]:
    """Return the groups without a successful answer, in their order.

    `values` (B,) is the deciding reward of each answer; NaN, of a lost answer, counts as a failure.
    """
    won = {group for group, value in zip(groups, values.tolist(), strict=True) if value >= success}
    return [group for group in dict.fromkeys(groups) if group not in won]


def check_success(name: str | None, rewards: Sequence[str]) -> None:
    """Raise InputError if `algorithm.hints.reward` does not name the reward that decides whether a sample succeeds."""
    if name is None and len(rewards) > 1:
        raise InputError(f"algorithm.hints.reward: name the reward that measures success, one of {', '.join(rewards)}")
    if name is not None and name not in rewards:
        raise InputError(f"algorithm.hints.reward: {name!r} is not one of rewards, {nearest(name, rewards)}")
