"""The `shapes` reward: does a 64 x 64 picture show what its caption says, judged by classical vision.

Verifiable, not learnt, after GenEval's idea (objects, counts, colours, positions; arXiv 2310.11513): segment the picture
by colour, take connected components, name each component's shape by comparing it with a drawn circle, square and
triangle of the same bounding box, and compare what was found with the parsed caption. The vocabulary below is the whole
language of the captions, `flowgrpo/shapes/scenes.py` draws the pictures.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch
from scipy import ndimage

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
RELATIONS = {
    "left of": (-1, 0),
    "right of": (1, 0),
    "above": (0, -1),
    "below": (0, 1),
}  # the first object's direction (x, y)

SMALLEST_AREA = 24  # pixels; the smallest drawn object covers 72
LEAST_OVERLAP = 0.75  # intersection over union with the best template, below which a component has no shape
RELATION_MARGIN = 4.0  # pixels between the two centres along the relation's axis

_PHRASE = (
    rf"(?P<count{{0}}>{'|'.join(COUNTS)}) (?P<colour{{0}}>{'|'.join(COLOURS)}) (?P<shape{{0}}>{'|'.join(SHAPES)})s?"
)
_CAPTION = re.compile(
    _PHRASE.format(1) + rf"(?: (?P<joint>and|{'|'.join(RELATIONS)}) " + _PHRASE.format(2) + r")?", re.IGNORECASE
)


@dataclass(frozen=True)
class Caption:
    """What a caption asks for: `objects` counts each (colour, shape); `relation` is None or (first, name, second)."""

    objects: Counter
    relation: tuple[tuple[str, str], str, tuple[str, str]] | None


@dataclass(frozen=True)
class Found:
    """One object found in a picture: its colour, its shape (None if it resembles no template) and its centre (x, y)."""

    colour: str
    shape: str | None
    centre: tuple[float, float]


def parse(caption: str) -> Caption:
    """Read a caption such as "two red circles and a blue square" or "a red circle left of a blue square".

    Raises:
        ValueError: the caption is not in the grammar; the sentence names what is.
    """
    match = _CAPTION.fullmatch(" ".join(caption.split()).rstrip("."))
    if match is None:
        raise ValueError(
            f"the shapes reward cannot read the prompt {caption!r}: write for example 'two red circles and a blue square' "
            f"or 'a red circle left of a blue square' (colours {', '.join(COLOURS)}; shapes {', '.join(SHAPES)}; "
            f"counts {', '.join(COUNTS)})"
        )
    words = {name: value.lower() for name, value in match.groupdict().items() if value is not None}
    kinds = [(words[f"colour{i}"], words[f"shape{i}"]) for i in "12" if f"colour{i}" in words]
    objects = Counter()
    for i, kind in zip("12", kinds, strict=False):
        objects[kind] += COUNTS[words[f"count{i}"]]
    joint = words.get("joint", "and")
    return Caption(objects, None if joint == "and" else (kinds[0], joint, kinds[1]))


def detect(image_CHW: np.ndarray) -> list[Found]:
    """Objects of one picture, float (3, H, W) in [0, 1]: colour classes, connected components, shape by template."""
    palette = np.array([BACKGROUND, *COLOURS.values()], dtype=np.float32)
    distance = ((image_CHW[None] - palette[:, :, None, None]) ** 2).sum(1)  # (1 + colours, H, W)
    nearest = distance.argmin(0)
    found = []
    for index, colour in enumerate(COLOURS, start=1):
        # Opening by 2 x 2 drops the blended rim that an object of another colour leaves in this colour class.
        mask = ndimage.binary_opening(nearest == index, np.ones((2, 2), bool))
        labels, _ = ndimage.label(mask)
        for label, box in enumerate(ndimage.find_objects(labels), start=1):
            component = labels[box] == label
            if component.sum() >= SMALLEST_AREA:
                y, x = ndimage.center_of_mass(component)
                found.append(Found(colour, _shape(component), (x + box[1].start, y + box[0].start)))
    return found


def _shape(component: np.ndarray) -> str | None:
    height, width = component.shape
    if not 0.6 < height / width < 1.6:
        return None
    y, x = np.mgrid[0:height, 0:width]
    v, u = (y + 0.5) / height, (x + 0.5) / width  # the bounding box as the unit square, v downwards
    templates = {
        "circle": (u - 0.5) ** 2 + (v - 0.5) ** 2 <= 0.25,
        "square": np.ones_like(component),
        "triangle": np.abs(u - 0.5) <= v / 2,
    }
    overlap = {name: (component & t).sum() / (component | t).sum() for name, t in templates.items()}
    best = max(overlap, key=overlap.get)
    return best if overlap[best] >= LEAST_OVERLAP else None


def score(found: list[Found], caption: Caption) -> float:
    """Share of the caption that is true: matched objects over the larger of asked and found, halved if a relation fails."""
    seen = Counter((f.colour, f.shape) for f in found)
    matched = sum((seen & caption.objects).values())
    value = matched / max(sum(seen.values()), sum(caption.objects.values()))
    return value if _relation_holds(found, caption) else value / 2


def _relation_holds(found: list[Found], caption: Caption) -> bool:
    if caption.relation is None:
        return True
    first, name, second = caption.relation
    axis = np.array(RELATIONS[name])
    places = [[np.array(f.centre) for f in found if (f.colour, f.shape) == kind] for kind in (first, second)]
    return any((a - b) @ axis > RELATION_MARGIN for a in places[0] for b in places[1])


def shapes(images: torch.Tensor, prompts: list[str]) -> list[float]:
    """Share of each caption that its picture shows, in [0, 1].

    Args:
        images: float (B, 3, H, W) in [0, 1]; made for the 64 x 64 pictures of the embedded model.
        prompts: B captions of the grammar that `parse` reads.

    Raises:
        ValueError: these are no such images, or a prompt is not in the grammar.
    """
    check_images("shapes", images)
    captions = [parse(prompt) for prompt in prompts]
    return [
        score(detect(image), caption) for image, caption in zip(images.float().cpu().numpy(), captions, strict=True)
    ]
