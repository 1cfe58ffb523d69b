"""The `patterns` reward: how much of its caption a 64 x 64 picture shows, from its layout to the pattern on each object.

As `rewards/shapes.py`, by classical vision and without a learnt part: it finds objects by colour, names their shapes, and
reads the pattern on each by correlation with the three patterns of `template`. `flowgrpo/data/generators/patterned.py` draws
the pictures. The parts of a caption are decided at different noise levels: places and colours first, then shapes, and the
faint patterns last.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rewards import shapes as scenes
from rewards.image import check_images

COLOURS = ("red", "yellow", "green", "blue")
SHAPES = scenes.SHAPES
PATTERNS = ("banded", "striped", "checked")
RELATIONS = scenes.RELATIONS
PERIOD = 8  # pixels
LEAST_SHARE = 0.5  # of the variance inside an object that its pattern explains
# The part of an object's box that every shape covers: rows and columns in units of the box.
INSIDE = ((0.45, 0.85), (0.28, 0.72))

_COLOUR, _SHAPE, _PATTERN, _RELATION = ("|".join(words) for words in (COLOURS, SHAPES, PATTERNS, RELATIONS))
_PHRASE = rf"a (?P<pattern{{0}}>{_PATTERN}) (?P<colour{{0}}>{_COLOUR}) (?P<shape{{0}}>{_SHAPE})"
_CAPTION = re.compile(rf"{_PHRASE.format(1)}(?: (?P<joint>and|{_RELATION}) {_PHRASE.format(2)})?", re.IGNORECASE)


@dataclass(frozen=True)
class Kind:
    """What a caption says of one object."""

    pattern: str
    colour: str
    shape: str


@dataclass(frozen=True)
class Caption:
    """A parsed caption: one object, or two of different colours; `relation` is that of the first to the second, or None."""

    kinds: tuple[Kind, ...]
    relation: str | None = None

    def __str__(self) -> str:
        """Return the caption."""
        phrases = [f"a {kind.pattern} {kind.colour} {kind.shape}" for kind in self.kinds]
        return f" {self.relation or 'and'} ".join(phrases)


def parse(caption: str) -> Caption:
    """Parse a caption such as "a striped red circle left of a checked blue square"; raise ValueError for any other."""
    match = _CAPTION.fullmatch(" ".join(caption.split()).rstrip("."))
    words = {name: value.lower() for name, value in match.groupdict().items() if value is not None} if match else {}
    kinds = tuple(
        Kind(words[f"pattern{i}"], words[f"colour{i}"], words[f"shape{i}"]) for i in "12" if f"colour{i}" in words
    )
    if not kinds or len({kind.colour for kind in kinds}) < len(kinds):
        raise ValueError(
            f"the patterns reward cannot read the prompt {caption!r}: write for example 'a striped red circle' or "
            f"'a striped red circle left of a checked blue square', of two colours (patterns {', '.join(PATTERNS)}; "
            f"colours {', '.join(COLOURS)}; shapes {', '.join(SHAPES)})"
        )
    joint = words.get("joint", "and")
    return Caption(kinds, None if joint == "and" else joint)


def template(pattern: str, height: int, width: int, *, top: int = 0, left: int = 0) -> np.ndarray:
    """Return a pattern, 1 or -1, on the pixels of a box (height, width) whose corner lies at (top, left) of the picture."""
    y, x = np.mgrid[top : top + height, left : left + width]
    rows, columns = (1 - 2 * (each // (PERIOD // 2) % 2) for each in (y, x))
    return {"banded": rows, "striped": columns, "checked": rows * columns}[pattern]


def read_pattern(image_CHW: np.ndarray, box: tuple[int, int, int, int]) -> str | None:
    """Return the pattern on the object in a box (left, top, right, bottom), or None if none explains its pixels."""
    left, top, right, bottom = box
    (first, last), (start, end) = (
        [round(low + at * (high - low)) for at in part]
        for part, low, high in zip(INSIDE, (top, left), (bottom, right), strict=True)
    )
    inside = image_CHW[:, first:last, start:end].mean(0)
    if not inside.size:
        return None
    inside = inside - inside.mean()
    total = np.square(inside).sum()
    shares = {}
    for pattern in PATTERNS:
        height, width = inside.shape
        wave = template(pattern, height, width, top=first, left=start).astype(float)
        wave -= wave.mean()
        shares[pattern] = np.square((inside * wave).sum()) / (np.square(wave).sum() * total + 1e-12)
    best = max(shares, key=lambda pattern: shares[pattern])
    return best if shares[best] >= LEAST_SHARE else None


@dataclass(frozen=True)
class Parts:
    """The parts of a caption that a picture shows, each in [0, 1]."""

    layout: float
    shape: float
    pattern: float


def compare(image_CHW: np.ndarray, found: Sequence[scenes.Found], caption: Caption) -> Parts:
    """Compare the objects of a picture with a caption, part by part.

    A part is the number of words of the caption (colours, shapes or patterns) that an object has, over the larger number of
    objects, asked or found. A relation that does not hold halves the layout.
    """
    most = max(len(found), len(caption.kinds))

    def share(has: Iterable[str | None], asked: Iterable[str]) -> float:
        return (Counter(has) & Counter(asked)).total() / most

    layout = share((f.colour for f in found), (kind.colour for kind in caption.kinds))
    return Parts(
        layout if _relation_holds(found, caption) else layout / 2,
        share((f.shape for f in found), (kind.shape for kind in caption.kinds)),
        share((read_pattern(image_CHW, f.box) for f in found), (kind.pattern for kind in caption.kinds)),
    )


def _relation_holds(found: Sequence[scenes.Found], caption: Caption) -> bool:
    if caption.relation is None:
        return True
    along_x, along_y = RELATIONS[caption.relation]
    first, second = ([f.centre for f in found if f.colour == kind.colour] for kind in caption.kinds)
    distances = ((ax - bx) * along_x + (ay - by) * along_y for ax, ay in first for bx, by in second)
    return any(distance > scenes.RELATION_MARGIN for distance in distances)


def patterns(images: torch.Tensor, prompts: Sequence[str]) -> list[float]:
    """Share of each caption that its picture shows, in [0, 1]: two fifths layout, one fifth shapes, two fifths patterns.

    Images are float (B, 3, H, W) in [0, 1]; made for the 64 x 64 pictures of the embedded model `patterns`.
    """
    return [(2 * part.layout + part.shape + 2 * part.pattern) / 5 for part in parts(images, prompts)]


def parts(images: torch.Tensor, prompts: Sequence[str]) -> list[Parts]:
    """Return the parts of each caption that its picture shows."""
    check_images("patterns", images)
    captions, pictures = [parse(prompt) for prompt in prompts], images.float().cpu().numpy()
    return [compare(*row) for row in zip(pictures, scenes.detect(pictures), captions, strict=True)]
