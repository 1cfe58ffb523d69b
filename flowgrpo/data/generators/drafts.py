"""Prompts that a generator draws, divided so that `eval` asks for combinations that `train` never shows.

A draft names its parts: what must be put together, as (kind, word, word, ...). A part is held out by its own hash, whatever
the seed and whatever the set. A row of `train` has no part that is held out; a row of `eval` has at least one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from flowgrpo.data.generators.tasks import SPLITS, is_held_out
from flowgrpo.data.tables import Row
from samplers import noise

Part = tuple[str | int, ...]


@dataclass(frozen=True)
class Draft:
    """A prompt, the parts that it puts together, and the further columns of its row."""

    prompt: str
    parts: tuple[Part, ...]
    columns: Row


@dataclass(frozen=True)
class PromptSet:
    """A set of prompts: how one is drawn, and how many there are of each split."""

    draw: Callable[[np.random.Generator], Draft]
    train: int = 512
    eval: int = 64


def split_of(draft: Draft) -> str:
    """The split that a draft belongs to, `train` or `eval`."""
    return "eval" if any(is_held_out(str(part[0]), part[1:]) for part in draft.parts) else "train"


def rows(name: str, one: PromptSet, split: str, seed: int = 0) -> list[Row]:
    """The rows of a set and split, no two alike; a larger set begins with the same ones.

    Row i is drawn at its own address (seed, name, split, i) until it is new. There must be more drafts than are asked for.
    """
    found: dict[str, Row] = {}
    for i in range(getattr(one, split)):
        rng = noise.generator(seed, "prompts", name, split, i)
        draft = one.draw(rng)
        while split_of(draft) != split or repr(draft) in found:
            draft = one.draw(rng)
        found[repr(draft)] = {"prompt": draft.prompt, **draft.columns}
    return list(found.values())


def together(parts: Sequence[Sequence[Row]]) -> list[Row]:
    """All rows of several sets, each spread evenly from the first to the last place."""
    placed = [((i + 0.5) / len(part), row) for part in parts for i, row in enumerate(part)]
    return [row for _, row in sorted(placed, key=lambda pair: pair[0])]


def built_in(sets: Mapping[str, PromptSet]) -> dict[str, Callable[[], list[Row]]]:
    """What makes the rows of each set, by its name, a colon and the split."""
    return {f"{name}:{split}": partial(rows, name, one, split) for name, one in sets.items() for split in SPLITS}


def chosen(rng: np.random.Generator, words: Sequence, count: int = 1) -> list:
    """Some of `words`, all different, in random order."""
    return [words[i] for i in rng.choice(len(words), count, replace=False)]
