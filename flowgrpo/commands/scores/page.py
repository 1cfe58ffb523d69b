"""The table of docs/reference/rewards.md that repeats what `flowgrpo rewards` knows of the built-in rewards."""

from __future__ import annotations

import re

from rewards import BUILT_IN
from rewards.cards import Card

HEADS = ("name", "measures", "takes", "weights and licence")


def table() -> str:
    """Return the table of all built-in rewards, in Markdown."""
    rows = [(f"`{name}`", card.measures, card.inputs, _weights(card)) for name, card in BUILT_IN.items()]
    lines = [f"| {' | '.join(row)} |\n" for row in (HEADS, *rows)]
    return "".join([lines[0], "|---" * len(HEADS) + "|\n", *lines[1:]])


def _weights(card: Card) -> str:
    """Return the first weights, the size of all and the licence; without a size, where the weights come from."""
    name = re.split(",| [(]", card.weights or "-")[0]
    return f"{name}, {card.size / 1e9:.3g} GB; {card.licence}" if card.size else name
