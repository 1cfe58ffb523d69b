"""Memory of the rewards that a run loads beside its model."""

from __future__ import annotations

from collections.abc import Iterator

from flowgrpo.schema.sections import RunConfig
from rewards import BUILT_IN
from rewards.cards import BYTES


def reward_bytes(config: RunConfig) -> int:
    """Return the bytes of the weights of rewards that a process loads, as far as they are known.

    They are those of the cards, in the dtypes of the options. Rewards that are asked by URL or endpoint have none.
    """
    return sum(size or 0 for _, size in _reward_sizes(config))


def uncounted_rewards(config: RunConfig) -> list[str]:
    """Return the rewards that `reward_bytes` does not count: of other files or packages, of another path, and `votes`."""
    return [name for name, size in _reward_sizes(config) if size is None]


def _reward_sizes(config: RunConfig) -> Iterator[tuple[str, int | None]]:
    """Yield each reward and the bytes of its weights, None if unknown; each loads a model of its own."""
    for use in (*config.rewards, *config.eval_rewards):
        card, dtype, path = BUILT_IN.get(use.use), use.options.get("dtype"), use.options.get("path")
        if use.use.startswith(("http://", "https://")):
            yield use.use, 0
            continue
        loads_others = use.use == "votes" or "scores" in use.options
        known = not loads_others and path in (None, card and card.weights_id) and dtype in (None, *BYTES)
        yield use.use, card.memory(dtype) if card and known else None
