"""The `shapes` reward: how much of its caption a 64 x 64 picture shows, by classical vision.

The reward is verifiable and has no learnt part, after GenEval (objects, counts, colours, positions; arXiv 2310.11513). It
segments the picture by colour, finds connected components, names the shape of each by comparison with a drawn circle,
square and triangle of the same bounding box, and compares the objects with the parsed caption. The vocabulary below is the
whole caption language; `flowgrpo/data/generators/scenes.py` draws the pictures.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from rewards.compute import batched
from rewards.image import check_images

BACKGROUND = (0.96, 0.945, 0.91)
COLOURS = {
    "red": (0.88, 0.23, 0.19),
    "yellow": (0.95, 0.72, 0.02),
    "green": (0.16, 0.62, 0.36),
    "blue": (0.18, 0.44, 0.87),
    "purple": (0.56, 0.27, 0.68),
}
SHAPES = ("circle", "square", "triangle")
COUNTS = {"a": 1, "two": 2, "three": 3, "four": 4}
# Direction (x, y) of the first object seen from the second.
RELATIONS = {"left of": (-1, 0), "right of": (1, 0), "above": (0, -1), "below": (0, 1)}

SMALLEST_AREA = 24  # pixels; the smallest drawn object covers 72
LEAST_OVERLAP = 0.75  # with the best template, as intersection over union; below, a component has no shape
RELATION_MARGIN = 4.0  # pixels between the two centres along the relation's axis

_COUNT, _COLOUR, _SHAPE, _RELATION = ("|".join(words) for words in (COUNTS, COLOURS, SHAPES, RELATIONS))
_PHRASE = rf"(?P<count{{0}}>{_COUNT}) (?P<colour{{0}}>{_COLOUR}) (?P<shape{{0}}>{_SHAPE})s?"
_CAPTION = re.compile(rf"{_PHRASE.format(1)}(?: (?P<joint>and|{_RELATION}) {_PHRASE.format(2)})?", re.IGNORECASE)


@dataclass(frozen=True)
class Caption:
    """A parsed caption: `objects` counts each (colour, shape); `relation` is None or (first, name, second)."""

    objects: Counter
    relation: tuple[tuple[str, str], str, tuple[str, str]] | None


@dataclass(frozen=True)
class Found:
    """An object in a picture, its centre (x, y) and its box (left, top, right, bottom) in pixels."""

    colour: str
    shape: str | None
    centre: tuple[float, float]
    box: tuple[int, int, int, int]


def parse(caption: str) -> Caption:
    """Parse a caption such as "a red circle left of a blue square"; raise ValueError if it is not in the grammar."""
    match = _CAPTION.fullmatch(" ".join(caption.split()).rstrip("."))
    if match is None:
        raise ValueError(
            f"the shapes reward cannot read the prompt {caption!r}: write for example 'two red circles and a blue square' "
            f"or 'a red circle left of a blue square' (colours {', '.join(COLOURS)}; shapes {', '.join(SHAPES)}; "
            f"counts {', '.join(COUNTS)})"
        )
    words = {name: value.lower() for name, value in match.groupdict().items() if value is not None}
    kinds = [(words[f"colour{i}"], words[f"shape{i}"]) for i in "12" if f"colour{i}" in words]
    objects: Counter[tuple[str, str]] = Counter()
    for i, kind in zip("12", kinds, strict=False):
        objects[kind] += COUNTS[words[f"count{i}"]]
    joint = words.get("joint", "and")
    return Caption(objects, None if joint == "and" else (kinds[0], joint, kinds[1]))


def detect(images_BCHW: np.ndarray) -> list[list[Found]]:
    """Return the objects of each picture, float (B, 3, H, W) in [0, 1]."""
    from scipy import ndimage  # imported here so that captions can be read without it

    nearest_BHW = _open_mask(_nearest_colour(images_BCHW))
    count, height, width = nearest_BHW.shape
    # Stack a mask for each picture and colour. Keep the used lines, and one empty line below each run of them: it separates
    # components.
    masks = np.zeros((count, len(COLOURS), height + 1, width), bool)
    masks[:, :, :height] = nearest_BHW[:, None] == np.arange(1, 1 + len(COLOURS), dtype=np.uint8)[:, None, None]
    sheet = masks.reshape(-1, width)
    used = sheet.any(1)
    lines = np.flatnonzero(used | np.roll(used, 1))
    found: list[list[Found]] = [[] for _ in range(count)]
    if not len(lines):
        return found
    labels, _ = ndimage.label(sheet[lines])
    for label, (rows, columns) in enumerate(ndimage.find_objects(labels), start=1):
        component = labels[rows, columns] == label
        if component.size < SMALLEST_AREA:
            continue
        templates, areas = _templates(*component.shape)
        *shared, area, x, y = (templates @ component.ravel()).tolist()
        if area < SMALLEST_AREA:
            continue
        mask, top = divmod(int(lines[rows.start]), height + 1)
        image, colour = divmod(mask, len(COLOURS))
        shape = _shape(component.shape, area, areas, shared)
        box = (columns.start, top, columns.stop, top + component.shape[0])
        found[image].append(Found(list(COLOURS)[colour], shape, (x / area + columns.start, y / area + top), box))
    return found


def _nearest_colour(images_BCHW: np.ndarray) -> np.ndarray:
    """Return the nearest palette colour of each pixel, uint8 (B, H, W): 0 is the background, i the i-th of COLOURS."""
    palette = np.array([BACKGROUND, *COLOURS.values()], np.float32)
    nearest = np.zeros((len(images_BCHW), *images_BCHW.shape[2:]), np.uint8)
    cached = 16  # pictures that fit into the processor's cache
    for part, images in zip(batched(nearest, cached), batched(images_BCHW, cached), strict=True):
        red, green, blue = images.swapaxes(0, 1)
        least = np.inf
        for index, (r, g, b) in enumerate(palette):
            distance = (red - r) ** 2
            distance += (green - g) ** 2
            distance += (blue - b) ** 2
            np.maximum(part, (distance < least) * np.uint8(index), out=part)
            least = np.minimum(least, distance)
    return nearest


def _open_mask(nearest_BHW: np.ndarray) -> np.ndarray:
    """Clear pixels that no 2 x 2 block of one colour covers, such as the blended rim of another object."""
    vertical = nearest_BHW[:, 1:] == nearest_BHW[:, :-1]
    horizontal = nearest_BHW[:, 1:, 1:] == nearest_BHW[:, 1:, :-1]
    blocks = vertical[:, :, 1:] & vertical[:, :, :-1] & horizontal
    covered = np.zeros(nearest_BHW.shape, bool)
    for part in (covered[:, 1:], covered[:, :-1]):
        part[:, :, 1:] |= blocks
        part[:, :, :-1] |= blocks
    return nearest_BHW * covered


@lru_cache(512)
def _templates(height: int, width: int) -> tuple[np.ndarray, list[float]]:
    """Return templates (6, height * width), float64, for components of this size, and the areas of the first three.

    The rows are the masks of circle, square and triangle, then 1, x and y of each pixel. Their product with a component's
    mask gives the overlaps, the area, and the sums of x and y.
    """
    y, x = np.mgrid[0:height, 0:width]
    v, u = (y + 0.5) / height, (x + 0.5) / width  # the bounding box as the unit square, v downwards
    circle = (u - 0.5) ** 2 + (v - 0.5) ** 2 <= 0.25
    triangle = np.abs(u - 0.5) <= v / 2
    one = np.ones_like(u)
    summed = np.stack([circle, one, triangle, one, x, y]).reshape(6, -1)
    return summed, summed[:3].sum(1).tolist()


def _shape(size: tuple[int, int], area: float, areas: list[float], shared: list[float]) -> str | None:
    if not 0.6 < size[0] / size[1] < 1.6:
        return None
    overlap = [common / (area + whole - common) for whole, common in zip(areas, shared, strict=True)]
    best = max(range(len(SHAPES)), key=overlap.__getitem__)
    return SHAPES[best] if overlap[best] >= LEAST_OVERLAP else None


def score(found: list[Found], caption: Caption) -> float:
    """Return the number of matched objects over the larger of the numbers asked and found; half if the relation fails."""
    matched = (Counter((f.colour, f.shape) for f in found) & caption.objects).total()
    value = matched / max(len(found), caption.objects.total())
    return value if _relation_holds(found, caption) else value / 2


def _relation_holds(found: list[Found], caption: Caption) -> bool:
    if caption.relation is None:
        return True
    first, name, second = caption.relation
    along_x, along_y = RELATIONS[name]
    a, b = ([f.centre for f in found if (f.colour, f.shape) == kind] for kind in (first, second))
    distances = ((ax - bx) * along_x + (ay - by) * along_y for ax, ay in a for bx, by in b)
    return any(distance > RELATION_MARGIN for distance in distances)


def shapes(images: torch.Tensor, prompts: Sequence[str], caption: Sequence[str | None] | None = None) -> list[float]:
    """Share of each caption that its picture shows, in [0, 1]; made for the 64 x 64 pictures of the embedded model.

    The column `caption` replaces prompts that are no captions, such as edits. Images are float (B, 3, H, W) in [0, 1].
    """
    check_images("shapes", images)
    captions = [parse(text or prompt) for text, prompt in zip(caption or [None] * len(prompts), prompts, strict=True)]
    return [score(*row) for row in zip(detect(images.float().cpu().numpy()), captions, strict=True)]


def features(images: torch.Tensor, prompts: Sequence[str]) -> list[list[float]]:
    """Return features (B, 4) of pictures and captions, from which `rewards.models.votes` learns.

    The features are the number of right objects over the larger of the numbers asked and found, the share of asked objects
    with the right colour, the share with the right shape, and 1 if the relation holds (else 0).
    """
    check_images("shapes", images)
    captions = [parse(prompt) for prompt in prompts]
    return [_compare(*row) for row in zip(detect(images.float().cpu().numpy()), captions, strict=True)]


def _compare(found: list[Found], caption: Caption) -> list[float]:
    asked = caption.objects.total()
    colours: Counter[str] = Counter()
    shapes: Counter[str | None] = Counter()
    for (colour, shape), count in caption.objects.items():
        colours[colour] += count
        shapes[shape] += count
    right = (Counter((f.colour, f.shape) for f in found) & caption.objects).total()
    coloured = (Counter(f.colour for f in found) & colours).total()
    shaped = (Counter(f.shape for f in found) & shapes).total()
    return [right / max(len(found), asked), coloured / asked, shaped / asked, float(_relation_holds(found, caption))]


shapes.features = features  # type: ignore[attr-defined]  # mypy knows no attributes of functions
