"""The `geneval` reward: are the objects of a prompt in its picture, in their number, colours and places.

GenEval's evaluation (arXiv 2310.11513; evaluation/evaluate_images.py) with its columns `tag`, `include` and `exclude`, on
detectors of transformers in place of mmdet's. The rules below are pure functions of what a detector found.
Three ways to give credit:
    official    1 or 0 as GenEval counts: at least so many, none of what `exclude` forbids
    strict      1 or 0: exactly so many (the accuracy that Flow-GRPO reports while it trains)
    partial     the mean over all that is asked for (the reward Flow-GRPO trains on, arXiv 2505.05470)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from rewards.base import RewardError
from rewards.image import check_images

COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
RELATIONS = ("left of", "right of", "above", "below")
CREDITS = ("official", "strict", "partial")
MOST_OBJECTS = 16  # of a class in a picture, the surest ones
MARGIN = 0.1  # of both objects' extent, by which an offset along an axis is shortened before it tells a place
GREY = 0.6  # what lies outside an object's mask when its colour is named
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Detection:
    """An object that was found: its box (left, top, right, bottom) in pixels, how sure, its mask (H, W) and its colour."""

    box: tuple[float, float, float, float]
    score: float
    mask: torch.Tensor | None = None
    colour: str | None = None


Objects = Mapping[str, Sequence[Detection]]  # of one picture, by class, the surest first


@dataclass(frozen=True)
class Clause:
    """One row of `include` or `exclude`: `relation` places its objects relative to those of the row numbered `target`."""

    name: str
    count: int
    colour: str | None = None
    relation: str | None = None
    target: int = 0


def read_clauses(rows: Sequence[Mapping[str, Any]], place: str) -> tuple[Clause, ...]:
    """Rows of GenEval's metadata, such as `{"class": "dog", "count": 1, "color": "red", "position": ["left of", 0]}`.

    Args:
        place: how errors call the rows.

    Raises:
        RewardError: a row is not of that form.
    """
    clauses = []
    for row in rows:
        try:
            relation, target = row.get("position") or (None, 0)
            clause = Clause(str(row["class"]), int(row["count"]), row.get("color"), relation, target)
        except (AttributeError, KeyError, TypeError, ValueError):
            raise RewardError(f"{place}: {row!r} is no row such as {{'class': 'dog', 'count': 1}}") from None
        if clause.count < 1:
            raise RewardError(f"{place}: the count of {clause.name!r} is {clause.count}, not 1 or more")
        if clause.colour not in (None, *COLOURS):
            raise RewardError(f"{place}: there is no color {clause.colour!r}, choose one of {', '.join(COLOURS)}")
        if relation not in (None, *RELATIONS):
            raise RewardError(f"{place}: there is no position {relation!r}, choose one of {', '.join(RELATIONS)}")
        if relation and target not in range(len(clauses)):
            raise RewardError(
                f"{place}: the position of {clause.name!r} refers to row {target!r}, not to an earlier row"
            )
        clauses.append(clause)
    return tuple(clauses)


def relations(a: Detection, b: Detection) -> set[str]:
    """Where `a` lies, seen from `b`: none, one or two of RELATIONS.

    The offset of the centres is shortened along each axis by MARGIN of the summed extents; an axis tells a place where what
    is left is more than half of the offset's length.
    """
    offset = [(a.box[i] + a.box[i + 2] - b.box[i] - b.box[i + 2]) / 2 for i in (0, 1)]
    slack = [MARGIN * sum(o.box[i + 2] - o.box[i] for o in (a, b)) for i in (0, 1)]
    left = [math.copysign(max(abs(o) - s, 0), o) for o, s in zip(offset, slack, strict=True)]
    if max(abs(part) for part in left) < 1e-3:
        return set()
    x, y = (part / math.hypot(*offset) for part in left)
    holds = {"left of": x < -0.5, "right of": x > 0.5, "above": y < -0.5, "below": y > 0.5}
    return {relation for relation, true in holds.items() if true}


def official(objects: Objects, include: Sequence[Clause], exclude: Sequence[Clause] = ()) -> bool:
    """Whether GenEval counts a picture as correct.

    Of each class the surest `count` objects are looked at: they must be that many, all in the colour, each in the relation
    to each object of the target row, which must be right itself. No class of `exclude` may occur `count` times or more.
    """
    groups = _matched(objects, include, lambda found, clause: found[: clause.count])
    surplus = any(len(objects.get(clause.name, ())) >= clause.count for clause in exclude)
    return None not in groups and not surplus


def partial_credit(objects: Objects, include: Sequence[Clause]) -> float:
    """Mean over all that is asked for: counts, colours and relations; 1 if all is right, below 0 if far too many are found.

    A count earns 1 - |asked - found| / asked. Where the count is right, a colour earns the share of objects that have it and
    a relation 1 or 0; otherwise nothing. Flow-GRPO's code puts a 1 beside the 0 of a relation that fails, so two objects in
    the wrong places earn 0.75; we read its paper, where that 1 is not earned (0.67).
    """
    groups = _matched(objects, include, lambda found, clause: found)
    parts = []
    for clause, group in zip(include, groups, strict=True):
        found = objects.get(clause.name, ())
        parts.append(1 - abs(clause.count - len(found)) / clause.count)
        if clause.colour:
            alike = sum(o.colour == clause.colour for o in found) / clause.count
            parts.append(alike if len(found) == clause.count else 0.0)
        if clause.relation:
            parts.append(float(group is not None))
    return sum(parts) / len(parts)


def strict(objects: Objects, include: Sequence[Clause]) -> bool:
    """Whether all that is asked for is right and no object of an asked class is one too many."""
    return None not in _matched(objects, include, lambda found, clause: found)


def _matched(objects: Objects, include: Sequence[Clause], look_at: Callable) -> list[Sequence[Detection] | None]:
    """For each clause the objects that satisfy it, or None."""
    groups = []
    for clause in include:
        chosen = look_at(objects.get(clause.name, ()), clause)
        right = len(chosen) == clause.count and (not clause.colour or all(o.colour == clause.colour for o in chosen))
        if right and clause.relation:
            target = groups[clause.target]
            right = target is not None and all(clause.relation in relations(a, b) for a in chosen for b in target)
        groups.append(chosen if right else None)
    return groups


def surest(found: Objects, threshold: float) -> dict[str, list[Detection]]:
    """The objects surer than `threshold`, at most MOST_OBJECTS of a class, the surest first."""
    ordered = {name: sorted(many, key=lambda o: -o.score) for name, many in found.items()}
    return {name: [o for o in many if o.score > threshold][:MOST_OBJECTS] for name, many in ordered.items()}


def crop(image: torch.Tensor, detection: Detection) -> torch.Tensor:
    """What a picture, float (3, H, W), shows in a detection's box, at least one pixel; GREY outside its mask."""
    height, width = image.shape[1:]
    left, top, right, bottom = (round(edge) for edge in detection.box)
    left, top = min(max(left, 0), width - 1), min(max(top, 0), height - 1)
    if detection.mask is not None:
        image = torch.where(detection.mask, image, GREY)
    return image[:, top : max(bottom, top + 1), left : max(right, left + 1)]


class GenEval:
    """How much of a prompt's objects, counts, colours and places a picture shows; None where the column `include` is empty.

    The prompts are a .jsonl file with GenEval's columns `tag`, `include` and `exclude`.

    Options:
        credit: partial (default), strict or official.
        detector: hub id or folder of a Mask2Former for instances (it has the classes it was trained on; GenEval has COCO's)
            or of an OWLv2 (any class; GenEval's thresholds were not made for its scores). From Python also a function
            (images, names, threshold) -> a list of `Objects`.
        colours: hub id or folder of the CLIP that names colours; also a function (crops, names) -> colours.
        threshold, counting_threshold: least score of an object; the second where `tag` is counting.
        batch_size: pictures detected, and crops named, at once.
        dtype: float32, bfloat16 or float16.
        device: by default the GPU if there is one.

    Raises:
        RewardError: an option is wrong.
    """

    def __init__(
        self,
        credit: str = "partial",
        detector: str | Callable = "facebook/mask2former-swin-small-coco-instance",
        colours: str | Callable = "openai/clip-vit-large-patch14",
        threshold: float = 0.3,
        counting_threshold: float = 0.9,
        batch_size: int = 8,
        dtype: str = "float32",
        device: str | None = None,
    ):
        for option, value, choices in (("credit", credit, CREDITS), ("dtype", dtype, DTYPES)):
            if value not in choices:
                raise RewardError(f"the geneval reward has no {option} {value!r}, choose one of {', '.join(choices)}")
        if batch_size < 1:
            raise RewardError(f"the geneval reward needs a batch_size of 1 or more, not {batch_size}")
        self.credit = credit
        self.detector, self.colours = detector, colours
        self.threshold, self.counting_threshold = threshold, counting_threshold
        self.batch_size = batch_size
        self.dtype = DTYPES[dtype]
        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")

    def to(self, device: str | torch.device) -> GenEval:
        """Move the models there, now or when they are loaded."""
        self.device = device
        for loaded in ("_detect", "_name_colours"):
            if hasattr(self.__dict__.get(loaded), "to"):
                self.__dict__[loaded].to(device)
        return self

    def __call__(
        self,
        images: torch.Tensor,
        prompts: Sequence[str],
        include: Sequence[Sequence[Mapping] | None] | None = None,
        exclude: Sequence[Sequence[Mapping] | None] | None = None,
        tag: Sequence[str | None] | None = None,
    ) -> list[float | None]:
        """One value per picture; `images` is float (B, 3, H, W) in [0, 1]."""
        check_images("geneval", images)
        if include is None:
            raise RewardError("the geneval reward needs prompts with the column include, see GenEval's metadata")
        nothing = [None] * len(prompts)
        rows = list(zip(prompts, include, exclude or nothing, tag or nothing, strict=True))
        values = list(nothing)
        asked = [i for i, row in enumerate(rows) if row[1]]
        for start in range(0, len(asked), self.batch_size):
            part = asked[start : start + self.batch_size]
            pictures = images[part].float().to(self.device)
            for i, value in zip(part, self._values(pictures, [rows[i] for i in part]), strict=True):
                values[i] = value
        return values

    def _values(self, images: torch.Tensor, rows: Sequence[tuple]) -> list[float]:
        include = [read_clauses(row[1], f"include of the prompt {row[0]!r}") for row in rows]
        exclude = [read_clauses(row[2] or (), f"exclude of the prompt {row[0]!r}") for row in rows]
        thresholds = [self.counting_threshold if row[3] == "counting" else self.threshold for row in rows]
        names = sorted({clause.name for clauses in (*include, *exclude) for clause in clauses})
        found = self._detect(images, names, min(thresholds))
        objects = [surest(one, threshold) for one, threshold in zip(found, thresholds, strict=True)]
        self._colour(images, objects, include)
        if self.credit == "partial":
            return [partial_credit(*one) for one in zip(objects, include, strict=True)]
        if self.credit == "strict":
            return [float(strict(*one)) for one in zip(objects, include, strict=True)]
        return [float(official(*one)) for one in zip(objects, include, exclude, strict=True)]

    def _colour(self, images: torch.Tensor, objects: list[dict], include: Sequence[Sequence[Clause]]) -> None:
        """Name the colours of all objects whose clause asks for one, in place."""
        asked = dict.fromkeys((i, c.name) for i, clauses in enumerate(include) for c in clauses if c.colour)
        places = [(i, name, k) for i, name in asked for k in range(len(objects[i].get(name, ())))]
        for start in range(0, len(places), self.batch_size):
            part = places[start : start + self.batch_size]
            crops = [crop(images[i], objects[i][name][k]) for i, name, k in part]
            colours = self._name_colours(crops, [name for _, name, _ in part])
            for (i, name, k), colour in zip(part, colours, strict=True):
                objects[i][name][k] = replace(objects[i][name][k], colour=colour)

    @cached_property
    def _detect(self) -> Callable:
        from rewards.detectors import load_detector

        return self._loaded("detector", lambda path: load_detector(path, self.dtype))

    @cached_property
    def _name_colours(self) -> Callable:
        from rewards.colours import ColourNamer

        return self._loaded("colours", lambda path: ColourNamer(path, COLOURS, self.dtype))

    def _loaded(self, option: str, load: Callable) -> Callable:
        given = getattr(self, option)
        if callable(given):
            return given
        try:
            return load(given).to(self.device)
        except OSError as error:
            raise RewardError(
                f"geneval's {option}: {given!r} is neither a folder with a model nor one on the hub that can be reached"
            ) from error
