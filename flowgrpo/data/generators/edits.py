"""Pictures to edit and what to do with them, drawn by us: scenes of flat shapes, whose outcome the reward `shapes` reads.

    make the red circle blue                        recolour
    turn the red circle into a red square           reshape
    replace the red circle with a blue triangle     replace
    remove the red circle                           remove
    add a red circle                                add

A row has `image`, the file of the picture to edit; `target`, that of the picture that is asked for; `caption`, what the
target shows, which `shapes` compares a sample with; `edit`, one of the words above; `tag` is edit. What is held out is what
is done to which shape. The pictures are drawn on first use into the folder `edits` where copies of corpora are, each in a
file that is named by what it shows.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path

import numpy as np
from PIL import Image

from flowgrpo.data.generators import drafts, scenes
from flowgrpo.data.generators.drafts import Draft, PromptSet, chosen
from flowgrpo.data.generators.scenes import Drawn, Kind
from flowgrpo.data.generators.tasks import SPLITS
from flowgrpo.data.tables import Row
from flowgrpo.errors import InputError
from rewards.shapes import COLOURS, SHAPES

SIDE = 256  # pixels
KINDS = [(colour, shape) for colour in COLOURS for shape in SHAPES]
CHANGES = ("recolour", "reshape", "replace")
EDITS = (*CHANGES, "remove", "add")
NAMES = tuple(f"edits:{split}" for split in SPLITS)


def edit(rng: np.random.Generator) -> Draft:
    """An edit of a scene of one or two shapes; its columns `image` and `target` are the objects to be drawn."""
    (word,), (kind, other) = chosen(rng, EDITS), chosen(rng, KINDS, 2)
    first, second = scenes.arrange(caption([kind, other]), rng)
    before, after, new = [first, second], [second], ()
    if word in CHANGES:
        alike = {"recolour": (False, True), "reshape": (True, False), "replace": (False, False)}[word]
        kinds = [k for k in KINDS if (k[0] == kind[0], k[1] == kind[1]) == alike and k != other]
        (new,) = chosen(rng, kinds)
        after = [replace(first, kind=new), second]
    elif word == "add":
        before, after = after, before
    columns = {
        "tag": "edit",
        "edit": word,
        "image": before,
        "target": after,
        "caption": caption([o.kind for o in after]),
    }
    return Draft(_instruction(word, kind, new), ((word, *kind, *new),), columns)


def caption(kinds: Sequence[tuple[str, ...]]) -> str:
    """What a scene of single objects shows, in the words of the reward `shapes`."""
    return " and ".join(f"a {colour} {shape}" for colour, shape in kinds)


def _instruction(word: str, kind: Kind, new: tuple[str, ...]) -> str:
    shape = " ".join(kind)
    return {
        "recolour": lambda: f"make the {shape} {new[0]}",
        "reshape": lambda: f"turn the {shape} into {caption([new])}",
        "replace": lambda: f"replace the {shape} with {caption([new])}",
        "remove": lambda: f"remove the {shape}",
        "add": lambda: f"add a {shape}",
    }[word]()


SET = PromptSet(edit, train=256, eval=64)


def load(source: str, folder: str, key: str) -> list[Row]:
    """The rows of one of `NAMES`, with the absolute names of their pictures, which are drawn if they are not there.

    Args:
        folder: where copies of corpora are.
        key: the place named in errors.

    Raises:
        InputError: the pictures cannot be written.
    """
    into = Path(folder, "edits").resolve()
    rows = drafts.rows("edits", SET, source.partition(":")[2])
    try:
        into.mkdir(parents=True, exist_ok=True)
        return [row | {name: _drawn(row[name], into) for name in ("image", "target")} for row in rows]
    except OSError as error:
        raise InputError(f"{key}: the pictures of {source} cannot be drawn into {into} ({error.strerror})") from None


def _drawn(objects: Sequence[Drawn], folder: Path) -> str:
    """The file of a scene's picture, RGB of SIDE x SIDE pixels."""
    file = folder / f"{blake2b(repr((SIDE, objects)).encode(), digest_size=8).hexdigest()}.png"
    if not file.exists():
        scale = SIDE / scenes.SIZE
        larger = [replace(o, x=o.x * scale, y=o.y * scale, radius=o.radius * scale) for o in objects]
        pixels = (scenes.draw(larger, SIDE) * 255).round().astype(np.uint8)
        partial = file.with_suffix(f".{os.getpid()}.partial")
        Image.fromarray(pixels.transpose(1, 2, 0)).save(partial, "png")
        os.replace(partial, file)
    return str(file)
