"""The `moves` reward: how much of its caption a short clip shows: colours, shapes and where they move.

As `rewards/shapes.py`, by classical vision and without a learnt part. It finds the objects of every frame by colour, names
their shapes, and fits a line through the centres of each over the frames. `flowgrpo/data/generators/clips.py` draws clips.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rewards import shapes as scenes
from rewards.video import check_videos

COLOURS = ("red", "yellow", "green", "blue")
SHAPES = scenes.SHAPES
MOTIONS = {  # direction (x, y)
    "moves left": (-1, 0),
    "moves right": (1, 0),
    "moves up": (0, -1),
    "moves down": (0, 1),
    "stands still": (0, 0),
}
LEAST_DISTANCE = 5.0  # pixels that an object moves over a clip; below it stands still. Drawn ones move by 14 or more
LARGEST_SLANT = 0.5  # of a motion: pixels across its direction over pixels along it
LEAST_SEEN = 0.5  # share of the frames that show an object whose motion is read

_COLOUR, _SHAPE, _MOTION = ("|".join(words) for words in (COLOURS, SHAPES, MOTIONS))
_PHRASE = rf"an? (?P<colour{{0}}>{_COLOUR}) (?P<shape{{0}}>{_SHAPE}) (?P<motion{{0}}>{_MOTION})"
_CAPTION = re.compile(rf"{_PHRASE.format(1)}(?: and {_PHRASE.format(2)})?", re.IGNORECASE)


@dataclass(frozen=True)
class Kind:
    """What a caption says of one object."""

    colour: str
    shape: str
    motion: str


@dataclass(frozen=True)
class Caption:
    """A parsed caption: one object, or two of different colours."""

    kinds: tuple[Kind, ...]

    def __str__(self) -> str:
        """Return the caption."""
        return " and ".join(f"a {kind.colour} {kind.shape} {kind.motion}" for kind in self.kinds)


def parse(caption: str) -> Caption:
    """Parse a caption such as "a red circle moves left and a blue square stands still"; raise ValueError for any other."""
    match = _CAPTION.fullmatch(" ".join(caption.split()).rstrip("."))
    words = {name: value.lower() for name, value in match.groupdict().items() if value is not None} if match else {}
    kinds = tuple(
        Kind(words[f"colour{i}"], words[f"shape{i}"], words[f"motion{i}"]) for i in "12" if f"colour{i}" in words
    )
    if not kinds or len({kind.colour for kind in kinds}) < len(kinds):
        raise ValueError(
            f"the moves reward cannot read the prompt {caption!r}: write for example 'a red circle moves left' or 'a red "
            f"circle moves left and a blue square stands still', of two colours (colours {', '.join(COLOURS)}; shapes "
            f"{', '.join(SHAPES)}; motions {', '.join(MOTIONS)})"
        )
    return Caption(kinds)


def read_motion(centres: dict[int, tuple[float, float]], frames: int) -> str | None:
    """Return the motion of an object from its centre (x, y) in some frames; None if it moves aslant or is rarely seen."""
    if len(centres) < max(2, LEAST_SEEN * frames):
        return None
    times = np.array(list(centres), float)
    slope = np.polyfit(times, np.array(list(centres.values())), 1)[0]
    x, y = slope * (frames - 1)
    if max(abs(x), abs(y)) < LEAST_DISTANCE:
        return "stands still"
    for motion, (along_x, along_y) in MOTIONS.items():
        along, across = x * along_x + y * along_y, abs(x * along_y) + abs(y * along_x)
        if along > 0 and across <= LARGEST_SLANT * along:
            return motion
    return None


def score(found: Sequence[Sequence[scenes.Found]], caption: Caption) -> float:
    """Return the share of a caption that the objects of each frame show.

    An object earns a quarter for the frames that show its colour, a quarter for those that show its shape in it, and a half
    for its motion. The sum is divided by the number of objects that are asked for, or are found if those are more.
    """
    frames, total = len(found), 0.0
    for kind in caption.kinds:
        coloured = [[each for each in objects if each.colour == kind.colour] for objects in found]
        seen = sum(bool(objects) for objects in coloured) / frames
        shaped = sum(any(each.shape == kind.shape for each in objects) for objects in coloured) / frames
        centres = {time: objects[0].centre for time, objects in enumerate(coloured) if len(objects) == 1}
        total += (seen + shaped + 2 * (read_motion(centres, frames) == kind.motion)) / 4
    number = sum(map(len, found)) / frames
    return total / max(len(caption.kinds), number)


def moves(videos: torch.Tensor, prompts: Sequence[str]) -> list[float]:
    """Share of each caption that its clip shows, in [0, 1]; made for the clips of the embedded model `clips`.

    Videos are float (B, F, 3, H, W) in [0, 1], of two frames or more.
    """
    check_videos("moves", videos, frames=2)
    captions = [parse(prompt) for prompt in prompts]
    found = scenes.detect(videos.float().flatten(0, 1).cpu().numpy())
    frames = videos.shape[1]
    return [score(found[i * frames : (i + 1) * frames], caption) for i, caption in enumerate(captions)]
