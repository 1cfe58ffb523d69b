"""Pictures and captions that the embedded model `shapes` is trained on.

A scene is one to four flat shapes, drawn with anti-aliased edges by signed distance. `rewards/shapes.py` defines the
vocabulary and the grammar of captions, and parses them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import permutations

import numpy as np

from flowgrpo.data.generators import held_out
from rewards.shapes import BACKGROUND, COLOURS, COUNTS, RELATIONS, SHAPES, parse

SIZE = 64  # pixels
RADII = (7.0, 8.5)  # range of an object's half height, pixels
JITTER = 1.0  # largest offset from the centre of the cell, pixels
UNSEEN = (("green", "circle"), ("purple", "triangle"))  # kinds that no training caption names

Kind = tuple[str, str]  # (colour, shape)


@dataclass(frozen=True)
class Drawn:
    """An object of a scene: kind, centre (x, y) and half height, pixels."""

    kind: Kind
    x: float
    y: float
    radius: float


def _phrase(count: int, kind: Kind) -> str:
    word = next(word for word, number in COUNTS.items() if number == count)
    return f"{word} {kind[0]} {kind[1]}{'s' if count > 1 else ''}"


def every_caption() -> list[str]:
    """Return all captions: one phrase, two joined by "and", or two single objects in a relation; at most 4 objects."""
    kinds = [(colour, shape) for colour in COLOURS for shape in SHAPES]
    pairs = list(permutations(kinds, 2))
    return [
        *(_phrase(count, kind) for kind in kinds for count in (1, 2, 3, 4)),
        *(f"{_phrase(i, a)} and {_phrase(j, b)}" for a, b in pairs for i in (1, 2, 3) for j in (1, 2, 3) if i + j <= 4),
        *(f"{_phrase(1, a)} {relation} {_phrase(1, b)}" for a, b in pairs for relation in RELATIONS),
    ]


def names_unseen(caption: str) -> bool:
    """Return whether a caption of `every_caption` names a kind that training never shows."""
    return any(f"{colour} {shape}" in caption for colour, shape in UNSEEN)


def is_held_out(caption: str) -> bool:
    """Return whether training excludes a caption."""
    return held_out.is_held_out(caption, names_unseen)


@cache
def captions(split: str) -> tuple[str, ...]:
    """Return the captions of `train` (1,024) or `eval` (256); see `held_out.split_captions`."""
    return held_out.split_captions(every_caption(), names_unseen, split)


def arrange(caption: str, rng: np.random.Generator) -> list[Drawn]:
    """Return the objects of a caption at random places of a loose 3 x 3 grid, in the relation that the caption names."""
    parsed = parse(caption)
    while True:
        cells = rng.choice(9, sum(parsed.objects.values()), replace=False)
        objects = [_place(kind, cell, rng) for kind, cell in zip(parsed.objects.elements(), cells, strict=True)]
        if parsed.relation is None or dominates(objects[0], objects[1], parsed.relation[1]):
            return objects


def _place(kind: Kind, cell: int, rng: np.random.Generator) -> Drawn:
    x, y = (np.array(divmod(cell, 3)) + 0.5) * SIZE / 3 + rng.uniform(-JITTER, JITTER, 2)
    return Drawn(kind, x, y, rng.uniform(*RADII))


def dominates(first: Drawn, second: Drawn, relation: str) -> bool:
    """Return whether the offset of two objects lies mostly along the direction that a relation names."""
    along = np.array(RELATIONS[relation])
    offset = np.array([first.x - second.x, first.y - second.y])
    return bool(offset @ along > np.abs(offset @ along[::-1]))


def draw(objects: list[Drawn], size: int = SIZE) -> np.ndarray:
    """Draw a scene as float32 (3, size, size) in [0, 1]."""
    image = np.broadcast_to(np.array(BACKGROUND, np.float32)[:, None, None], (3, size, size)).copy()
    for o in objects:
        image += cover(o, size) * (np.array(COLOURS[o.kind[0]], np.float32)[:, None, None] - image)
    return image


def cover(o: Drawn, size: int = SIZE) -> np.ndarray:
    """Return how much of each pixel an object covers, (size, size) in [0, 1]."""
    y, x = np.mgrid[0:size, 0:size].astype(np.float32) + 0.5
    return np.clip(0.5 - _signed_distance(o, x, y), 0, 1)


def _signed_distance(o: Drawn, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    dx, dy = x - o.x, y - o.y
    if o.kind[1] == "circle":
        return np.hypot(dx, dy) - o.radius
    if o.kind[1] == "square":
        side = o.radius * 0.9
        return np.maximum(np.abs(dx), np.abs(dy)) - side
    # Upright triangle in a box of 2 r: two sides of slope 2, and the base.
    slanted = (2 * np.abs(dx) - (dy + o.radius)) / np.sqrt(5)
    return np.maximum(slanted, dy - o.radius)
