"""Generated image edits: scenes of flat shapes and instructions, scored by the reward `shapes`.

    make the red circle blue                        recolour
    turn the red circle into a red square           reshape
    replace the red circle with a blue triangle     replace
    remove the red circle                           remove
    add a red circle                                add

The columns are `image` and `target`, the files of the input and of the expected picture; `caption`, the content of the
target, which `shapes` compares with; `edit`, one of the words above; and `tag` (edit). Combinations of an edit's word with
its shapes are held out. The pictures are drawn on first use into `edits` in the folder of the corpora, each named by a hash
of its content.
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
from flowgrpo.data.generators.drafts import Draft, PromptSet, choose
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
    """Draw an edit of a scene of one or two shapes; `image` and `target` are the objects before and after it."""
    (word,), (kind, other) = choose(rng, EDITS), choose(rng, KINDS, 2)
    first, second = scenes.arrange(caption([kind, other]), rng)
    before, after, new = [first, second], [second], ()
    if word in CHANGES:
        alike = {"recolour": (False, True), "reshape": (True, False), "replace": (False, False)}[word]
        kinds = [k for k in KINDS if (k[0] == kind[0], k[1] == kind[1]) == alike and k != other]
        (new,) = choose(rng, kinds)
        after = [replace(first, kind=new), second]
    elif word == "add":
        before, after = after, before
    shows = caption([o.kind for o in after])
    columns = {"tag": "edit", "edit": word, "image": before, "target": after, "caption": shows}
    return Draft(_instruction(word, kind, new), ((word, *kind, *new),), columns)


def caption(kinds: Sequence[tuple[str, ...]]) -> str:
    """Return the caption of a scene of single objects, as the reward `shapes` reads it."""
    return " and ".join(f"a {colour} {shape}" for colour, shape in kinds)


def _instruction(word: str, kind: Kind, new: tuple[str, ...]) -> str:
    shape = " ".join(kind)
    match word:
        case "recolour":
            return f"make the {shape} {new[0]}"
        case "reshape":
            return f"turn the {shape} into {caption([new])}"
        case "replace":
            return f"replace the {shape} with {caption([new])}"
    return f"remove the {shape}" if word == "remove" else f"add a {shape}"


SET = PromptSet(edit, train=256, eval=64)


def load(source: str, folder: str, key: str) -> list[Row]:
    """Return the rows of a set in `NAMES`; draw missing pictures into `folder`/edits, or raise InputError."""
    into = Path(folder, "edits").resolve()
    rows = drafts.rows("edits", SET, source.partition(":")[2])
    try:
        into.mkdir(parents=True, exist_ok=True)
        return [row | {name: _picture_file(row[name], into) for name in ("image", "target")} for row in rows]
    except OSError as error:
        raise InputError(f"{key}: the pictures of {source} cannot be drawn into {into} ({error.strerror})") from None


def _picture_file(objects: Sequence[Drawn], folder: Path) -> str:
    file = folder / f"{blake2b(repr((SIDE, objects)).encode(), digest_size=8).hexdigest()}.png"
    if not file.exists():
        scale = SIDE / scenes.SIZE
        larger = [replace(o, x=o.x * scale, y=o.y * scale, radius=o.radius * scale) for o in objects]
        pixels = (scenes.draw(larger, SIDE) * 255).round().astype(np.uint8)
        partial = file.with_suffix(f".{os.getpid()}.partial")
        Image.fromarray(pixels.transpose(1, 2, 0)).save(partial, "png")
        os.replace(partial, file)
    return str(file)
