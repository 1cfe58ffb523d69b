"""Whether an iteration learnt anything, by its metric line, and why not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def is_idle(line: Mapping[str, Any]) -> bool:
    """Whether an iteration learnt nothing: no advantage was other than 0, or no update could be made."""
    return not line["groups/teaching"] or not line["policy/updates"]


def is_sound(line: Mapping[str, Any]) -> bool:
    """Whether the samples of an iteration or an evaluation had rewards, and what they had to teach could be learnt."""
    stuck = line["phase"] == "train" and line["groups/teaching"] and not line["policy/updates"]
    return line["reward/mean"] is not None and not stuck


def why(line: Mapping[str, Any]) -> str:
    """Why an iteration had nothing to learn."""
    lost = line["reward/lost"]
    if line["reward/mean"] is None:
        return "every sample was lost" if lost else "no reward applies to any of its samples"
    if line["groups/teaching"]:
        skipped = line["policy/skipped_updates"]
        return "no update had a gradient that is finite" if skipped else "nothing of its samples can be trained on"
    return "the rewards of each group are equal" + (f", and {lost} samples were lost" if lost else "")
