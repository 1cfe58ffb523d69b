"""Compositional prompts in GenEval's format (arXiv 2310.11513): objects, counts, colours and positions.

Rows have GenEval's columns `tag`, `include` and `exclude`, which the reward `geneval` reads. The sets are GenEval's six
tasks and two harder ones of ours; `compositions` interleaves all eight.

    single_object   a photo of a bench
    two_object      a photo of a bench and a dog
    counting        a photo of three dogs
    colors          a photo of a red bench
    position        a photo of a dog left of a bench
    color_attr      a photo of a red bench and a blue dog
    two_counts      a photo of two benches and three dogs                          (ours; its tag is counting)
    two_relations   a photo of a dog left of a bench and a cup above the bench     (ours; its tag is position)

Some pairs of objects, objects with a count, and objects with a colour are held out for `eval` across all sets: a pair of
`two_object:eval` is in no row of `position:train`. Single objects are held out in `single_object` only. The objects are
COCO's 80 classes in GenEval's names.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from flowgrpo.data.generators.drafts import Draft, Part, PromptSet, choose, interleave, row_functions, rows
from flowgrpo.data.generators.tasks import SPLITS
from flowgrpo.data.tables import Row
from rewards.objects.rules import COLOURS, RELATIONS

OBJECTS = (
    "person", "bicycle", "car", "motorcycle", "airplane", "bus", "train", "truck", "boat", "traffic light",
    "fire hydrant", "stop sign", "parking meter", "bench", "bird", "cat", "dog", "horse", "sheep", "cow", "elephant",
    "bear", "zebra", "giraffe", "backpack", "umbrella", "handbag", "tie", "suitcase", "frisbee", "skis", "snowboard",
    "sports ball", "kite", "baseball bat", "baseball glove", "skateboard", "surfboard", "tennis racket", "bottle",
    "wine glass", "cup", "fork", "knife", "spoon", "bowl", "banana", "apple", "sandwich", "orange", "broccoli",
    "carrot", "hot dog", "pizza", "donut", "cake", "chair", "couch", "potted plant", "bed", "dining table", "toilet",
    "tv", "laptop", "computer mouse", "tv remote", "computer keyboard", "cell phone", "microwave", "oven", "toaster",
    "sink", "refrigerator", "book", "clock", "vase", "scissors", "teddy bear", "hair drier", "toothbrush",
)  # fmt: skip
COLOURED = tuple(name for name in OBJECTS if name not in ("person", "orange"))
NUMBERS = {2: "two", 3: "three", 4: "four"}
PLURALS = {"person": "people", "sheep": "sheep", "knife": "knives", "computer mouse": "computer mice"}
UNITS = {"scissors": "pair", "skis": "pair", "broccoli": "head"}  # counting words of objects without a plain plural
HISSING = ("s", "x", "ch", "sh")  # endings with the plural -es


def phrase(name: str, count: int = 1, colour: str | None = None, article: str | None = None) -> str:
    """Return objects in words: "a red bench", "three dogs", "the pair of skis"."""
    coloured = f"{colour} {name}" if colour else name
    if name in UNITS:
        unit = UNITS[name]
        words = f"{unit if count == 1 else unit + 's'} of {coloured}"
    else:
        plural = PLURALS.get(name, name + ("es" if name.endswith(HISSING) else "s"))
        words = coloured if count == 1 else coloured.removesuffix(name) + plural
    if count > 1:
        return f"{NUMBERS[count]} {words}"
    return f"{article or ('an' if words[0] in 'aeiou' else 'a')} {words}"


def _clause(name: str, count: int = 1, **further: object) -> Row:
    return {"class": name, "count": count, **further}


def _draft(tag: str, words: str, parts: list[Part], include: list[Row], *, exclude: list[Row] | None = None) -> Draft:
    columns = {"tag": tag, "include": include, "exclude": exclude}
    return Draft(f"a photo of {words}", tuple(parts), columns)


def _pair(a: str, b: str) -> Part:
    return ("pair", *sorted((a, b)))


def single_object(rng: np.random.Generator) -> Draft:
    """Draw one object."""
    (name,) = choose(rng, OBJECTS)
    return _draft("single_object", phrase(name), [("alone", name)], [_clause(name)])


def two_object(rng: np.random.Generator) -> Draft:
    """Draw two objects."""
    a, b = choose(rng, OBJECTS, 2)
    return _draft("two_object", f"{phrase(a)} and {phrase(b)}", [_pair(a, b)], [_clause(a), _clause(b)])


def counting(rng: np.random.Generator) -> Draft:
    """Draw two, three or four of an object; the column `exclude` has one more of it."""
    (name,), (count,) = choose(rng, OBJECTS), choose(rng, list(NUMBERS))
    parts: list[Part] = [("count", name, count)]
    exclude = [_clause(name, count + 1)]
    return _draft("counting", phrase(name, count), parts, [_clause(name, count)], exclude=exclude)


def colors(rng: np.random.Generator) -> Draft:
    """Draw one object in a colour."""
    (name,), (colour,) = choose(rng, COLOURED), choose(rng, COLOURS)
    include = [_clause(name, color=colour)]
    return _draft("colors", phrase(name, colour=colour), [("colour", name, colour)], include)


def position(rng: np.random.Generator) -> Draft:
    """Draw one object in a relation to another."""
    (a, b), (relation,) = choose(rng, OBJECTS, 2), choose(rng, RELATIONS)
    include = [_clause(b), _clause(a, position=[relation, 0])]
    return _draft("position", f"{phrase(a)} {relation} {phrase(b)}", [_pair(a, b)], include)


def color_attr(rng: np.random.Generator) -> Draft:
    """Draw two objects in two colours."""
    a, b = choose(rng, COLOURED, 2)
    one, other = choose(rng, COLOURS, 2)
    words = f"{phrase(a, colour=one)} and {phrase(b, colour=other)}"
    parts = [_pair(a, b), ("colour", a, one), ("colour", b, other)]
    return _draft("color_attr", words, parts, [_clause(a, color=one), _clause(b, color=other)])


def two_counts(rng: np.random.Generator) -> Draft:
    """Draw two kinds of object with different counts."""
    a, b = choose(rng, OBJECTS, 2)
    i, j = choose(rng, list(NUMBERS), 2)
    words = f"{phrase(a, i)} and {phrase(b, j)}"
    parts = [_pair(a, b), ("count", a, i), ("count", b, j)]
    exclude = [_clause(a, i + 1), _clause(b, j + 1)]
    return _draft("counting", words, parts, [_clause(a, i), _clause(b, j)], exclude=exclude)


def two_relations(rng: np.random.Generator) -> Draft:
    """Draw two objects, each in a different relation to a third."""
    a, b, c = choose(rng, OBJECTS, 3)
    one, other = choose(rng, RELATIONS, 2)
    words = f"{phrase(a)} {one} {phrase(c)} and {phrase(b)} {other} {phrase(c, article='the')}"
    include = [_clause(c), _clause(a, position=[one, 0]), _clause(b, position=[other, 0])]
    return _draft("position", words, [_pair(a, b), _pair(a, c), _pair(b, c)], include)


SETS = {
    "single_object": PromptSet(single_object, train=48, eval=8),
    "two_object": PromptSet(two_object),
    "counting": PromptSet(counting, train=160, eval=24),
    "colors": PromptSet(colors),
    "position": PromptSet(position),
    "color_attr": PromptSet(color_attr),
    "two_counts": PromptSet(two_counts),
    "two_relations": PromptSet(two_relations),
}

BUILT_IN: dict[str, Callable[[], list[Row]]] = row_functions(SETS) | {
    f"compositions:{split}": lambda split=split: interleave([rows(name, one, split) for name, one in SETS.items()])
    for split in SPLITS
}
