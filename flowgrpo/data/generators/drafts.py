"""Generated prompts, split so that `eval` has combinations that `train` never has.

A draft lists its parts: combinations (kind, word, word, ...). The hash of a part decides whether it is held out, for all
seeds and sets alike. Rows of `train` have no held-out part; rows of `eval` have at least one.
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
    """A prompt, its parts, and the further columns of its row."""

    prompt: str
    parts: tuple[Part, ...]
    columns: Row


@dataclass(frozen=True)
class PromptSet:
    """A set of prompts: its generator and the size of each split."""

    draw: Callable[[np.random.Generator], Draft]
    train: int = 512
    eval: int = 64


def split_of(draft: Draft) -> str:
    """Return the split of a draft, `train` or `eval`."""
    return "eval" if any(is_held_out(str(part[0]), part[1:]) for part in draft.parts) else "train"


def rows(name: str, one: PromptSet, split: str, seed: int = 0) -> list[Row]:
    """Return the distinct rows of a set and split; a larger size only appends rows.

    Row i is redrawn, with a generator of its own (seed, name, split, i), until it is new. This never ends if the set has
    fewer distinct drafts than rows.
    """
    by_draft: dict[str, Row] = {}
    for i in range(getattr(one, split)):
        rng = noise.generator(seed, "prompts", name, split, i)
        draft = one.draw(rng)
        while split_of(draft) != split or repr(draft) in by_draft:
            draft = one.draw(rng)
        by_draft[repr(draft)] = {"prompt": draft.prompt, **draft.columns}
    return list(by_draft.values())


def interleave(parts: Sequence[Sequence[Row]]) -> list[Row]:
    """Interleave the rows of several sets evenly."""
    placed = [((i + 0.5) / len(part), row) for part in parts for i, row in enumerate(part)]
    return [row for _, row in sorted(placed, key=lambda pair: pair[0])]


def row_functions(sets: Mapping[str, PromptSet]) -> dict[str, Callable[[], list[Row]]]:
    """Return a function for the rows of each set and split, by `name:split`."""
    return {f"{name}:{split}": partial(rows, name, one, split) for name, one in sets.items() for split in SPLITS}


def choose(rng: np.random.Generator, words: Sequence, count: int = 1) -> list:
    """Return `count` distinct words in random order."""
    return [words[i] for i in rng.choice(len(words), count, replace=False)]
