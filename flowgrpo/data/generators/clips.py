"""Clips and captions that the embedded model `clips` is trained on.

A clip is one flat shape or two of different colours. Each moves straight on or stands still, and none leaves the picture or
meets the other. `rewards/moves.py` defines the captions.
"""

from __future__ import annotations

from functools import cache
from itertools import product

import numpy as np

from flowgrpo.data.generators import held_out, scenes
from rewards.moves import COLOURS, MOTIONS, SHAPES, Caption, Kind

SIZE, FRAMES = 48, 9
RADII = (6.0, 7.5)  # range of an object's half height, pixels
DISTANCES = (14.0, 20.0)  # range of the way of an object that moves, pixels
GAP = 3.0  # least distance of two objects, and of an object from the border, pixels
UNSEEN = (
    Kind("green", "circle", "moves left"),
    Kind("red", "triangle", "moves up"),
    Kind("blue", "square", "moves right"),
)


@cache
def every_caption() -> tuple[Caption, ...]:
    """Return all captions."""
    kinds = [Kind(*words) for words in product(COLOURS, SHAPES, MOTIONS)]
    pairs = (Caption(pair) for pair in product(kinds, kinds) if pair[0].colour != pair[1].colour)
    return (*(Caption((kind,)) for kind in kinds), *pairs)


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


def arrange(caption: Caption, rng: np.random.Generator) -> list[list[scenes.Drawn]]:
    """Return the objects of each frame of a caption, at random places."""
    while True:
        ways = [_way(kind, rng) for kind in caption.kinds]
        frames = [list(objects) for objects in zip(*ways, strict=True)]
        if all(_apart(objects) for objects in frames):
            return frames


def _way(kind: Kind, rng: np.random.Generator) -> list[scenes.Drawn]:
    """Return an object in each frame, within the picture."""
    radius, length = rng.uniform(*RADII), rng.uniform(*DISTANCES)
    offset = np.array(MOTIONS[kind.motion]) * length
    low, high = radius + GAP, SIZE - radius - GAP
    start = rng.uniform(np.maximum(low, low - offset), np.minimum(high, high - offset))
    places = (start + offset * time / (FRAMES - 1) for time in range(FRAMES))
    return [scenes.Drawn((kind.colour, kind.shape), x, y, radius) for x, y in places]


def _apart(objects: list[scenes.Drawn]) -> bool:
    if len(objects) < 2:
        return True
    a, b = objects
    return max(abs(a.x - b.x), abs(a.y - b.y)) > a.radius + b.radius + GAP


def draw(frames: list[list[scenes.Drawn]]) -> np.ndarray:
    """Draw a clip as float32 (9, 3, 48, 48) in [0, 1]."""
    return np.stack([scenes.draw(objects, SIZE) for objects in frames])


def reword(caption: Caption, rates: tuple[float, float, float], rng: np.random.Generator) -> Caption:
    """Replace the words of a part of a caption at random, each part with its own rate: colours, shapes, motions."""
    colour, shape, motion = rng.random(3) < rates
    words = zip(rng.permutation(COLOURS), rng.choice(SHAPES, 2), rng.choice(list(MOTIONS), 2), strict=False)
    return Caption(
        tuple(
            Kind(str(c) if colour else kind.colour, str(s) if shape else kind.shape, str(m) if motion else kind.motion)
            for kind, (c, s, m) in zip(caption.kinds, words, strict=False)
        )
    )
