"""Pictures and captions that the embedded model `patterns` is trained on.

A scene is one flat shape or two of different colours, in the cells of a 2 x 2 grid, each with a faint pattern. Patterns lie
on the grid of the picture, not of the object. `rewards/patterns.py` defines the captions.
"""

from __future__ import annotations

from functools import cache
from itertools import product

import numpy as np

from flowgrpo.data.generators import held_out, scenes
from rewards.patterns import COLOURS, PATTERNS, RELATIONS, SHAPES, Caption, Kind, template

RADII = (11.0, 13.0)  # range of an object's half height, pixels
JITTER = 1.5  # largest offset from the centre of the cell, pixels
CONTRAST = 0.15  # of a pattern: the brightness of its pixels is 1 +- this
UNSEEN = (Kind("striped", "green", "circle"), Kind("checked", "red", "triangle"), Kind("banded", "blue", "square"))


@cache
def every_caption() -> tuple[Caption, ...]:
    """Return all captions."""
    kinds = [Kind(*words) for words in product(PATTERNS, COLOURS, SHAPES)]
    pairs = [(a, b) for a, b in product(kinds, kinds) if a.colour != b.colour]
    singles = [Caption((kind,)) for kind in kinds]
    return (*singles, *(Caption(pair, relation) for pair in pairs for relation in (None, *RELATIONS)))


def names_unseen(caption: Caption) -> bool:
    """Return whether a caption names a kind that training never shows."""
    return any(kind in UNSEEN for kind in caption.kinds)


def is_held_out(caption: Caption) -> bool:
    """Return whether training excludes a caption."""
    return held_out.is_held_out(caption, names_unseen)


@cache
def captions(split: str) -> tuple[str, ...]:
    """Return the captions of `train` (1,024) or `eval` (256); see `held_out.split_captions`."""
    return held_out.split_captions(every_caption(), names_unseen, split)


def arrange(caption: Caption, rng: np.random.Generator) -> list[scenes.Drawn]:
    """Return the objects of a caption in random cells, in the relation that the caption names."""
    while True:
        cells = rng.choice(4, len(caption.kinds), replace=False)
        objects = [_place(kind, cell, rng) for kind, cell in zip(caption.kinds, cells, strict=True)]
        if caption.relation is None or scenes.dominates(objects[0], objects[1], caption.relation):
            return objects


def _place(kind: Kind, cell: int, rng: np.random.Generator) -> scenes.Drawn:
    x, y = (np.array(divmod(cell, 2)) + 0.5) * scenes.SIZE / 2 + rng.uniform(-JITTER, JITTER, 2)
    return scenes.Drawn((kind.colour, kind.shape), x, y, rng.uniform(*RADII))


def draw(objects: list[scenes.Drawn], kinds: tuple[Kind, ...], contrast: float = CONTRAST) -> np.ndarray:
    """Draw a scene as float32 (3, 64, 64) in [0, 1]."""
    image = scenes.draw([])
    for o, kind in zip(objects, kinds, strict=True):
        cover, colour = scenes.cover(o), np.array(scenes.COLOURS[kind.colour], np.float32)[:, None, None]
        shaded = colour * (1 + contrast * template(kind.pattern, scenes.SIZE, scenes.SIZE)).astype(np.float32)
        image += cover * (np.minimum(shaded, 1) - image)
    return image


def reword(caption: Caption, rates: tuple[float, float, float], rng: np.random.Generator) -> Caption:
    """Replace the words of a part of a caption at random, each part with its own rate: layout, shapes, patterns.

    The words of a layout are colours and relation.
    """
    layout, shape, pattern = rng.random(3) < rates
    words = zip(rng.permutation(COLOURS), rng.choice(SHAPES, 2), rng.choice(PATTERNS, 2), strict=False)
    kinds = tuple(
        Kind(str(p) if pattern else kind.pattern, str(c) if layout else kind.colour, str(s) if shape else kind.shape)
        for kind, (c, s, p) in zip(caption.kinds, words, strict=False)
    )
    relation = caption.relation
    if layout and len(kinds) == 2:
        relation = [None, *RELATIONS][int(rng.integers(1 + len(RELATIONS)))]
    return Caption(kinds, relation)
