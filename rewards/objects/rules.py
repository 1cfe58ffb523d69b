"""GenEval's rules: clauses of a prompt about objects, and whether detections satisfy them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch

from rewards.base import RewardError

COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
RELATIONS = ("left of", "right of", "above", "below")
MOST_OBJECTS = 16  # of a class in a picture
MARGIN = 0.1  # of the summed extents; shortens the offset along each axis
GREY = 0.6  # replaces pixels outside an object's mask when its colour is named


@dataclass(frozen=True)
class Detection:
    """A detected object: box (left, top, right, bottom) in pixels, confidence, mask (H, W) and colour."""

    box: tuple[float, float, float, float]
    score: float
    mask: torch.Tensor | None = None
    colour: str | None = None


Objects = Mapping[str, Sequence[Detection]]  # of one picture, by class, the surest first


@dataclass(frozen=True)
class Clause:
    """A row of `include` or `exclude`; `relation` places its objects relative to those of the row numbered `target`."""

    name: str
    count: int
    colour: str | None = None
    _: KW_ONLY
    relation: str | None = None
    target: int = 0


def read_clauses(rows: Sequence[Mapping[str, Any]], place: str) -> tuple[Clause, ...]:
    """Read rows of GenEval's metadata; a RewardError names the malformed row and begins with `place`."""
    clauses: list[Clause] = []  # of {"class": "dog", "count": 1, "color": "red", "position": ["left of", 0]}
    for row in rows:
        try:
            relation, target = row.get("position") or (None, 0)
            clause = Clause(str(row["class"]), int(row["count"]), row.get("color"), relation=relation, target=target)
        except (AttributeError, KeyError, TypeError, ValueError):
            raise RewardError(f"{place}: {row!r} is not a row such as {{'class': 'dog', 'count': 1}}") from None
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
    """Return the places of `a` seen from `b`, up to two of RELATIONS.

    The offset of the centres is shortened along each axis by MARGIN of the summed extents. An axis counts if its
    shortened offset is more than half of the length of the full offset.
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
    """Return whether GenEval counts a picture as correct.

    For each clause of `include`, at least `count` objects of its class exist; the `count` most confident ones all have
    its colour, and its relation to every object that satisfies the target clause. For each clause of `exclude`, fewer
    than `count` objects of its class exist.
    """
    groups = _match(objects, include, lambda found, clause: found[: clause.count])
    surplus = any(len(objects.get(clause.name, ())) >= clause.count for clause in exclude)
    return None not in groups and not surplus


def partial_credit(objects: Objects, include: Sequence[Clause]) -> float:
    """Return the mean credit of required counts, colours and relations: at most 1, below 0 for far too many objects.

    A count earns 1 - |asked - found| / asked. If the count is right, a colour earns the share of objects that have it,
    and a relation earns 1 or 0; if the count is wrong, both earn 0. Flow-GRPO's code counts an extra 1 with each failed
    relation, so two objects in the wrong places earn 0.75. Here, as in its paper, they earn 0.67.
    """
    groups = _match(objects, include, lambda found, clause: found)
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
    """Return whether all clauses are satisfied with exact counts."""
    return None not in _match(objects, include, lambda found, clause: found)


def _match(objects: Objects, include: Sequence[Clause], look_at: Callable) -> list[Sequence[Detection] | None]:
    """Return for each clause the objects that `look_at` selects if they satisfy it, else None."""
    groups: list[Sequence[Detection] | None] = []
    for clause in include:
        chosen = look_at(objects.get(clause.name, ()), clause)
        right = len(chosen) == clause.count and (not clause.colour or all(o.colour == clause.colour for o in chosen))
        if right and clause.relation:
            target = groups[clause.target]
            right = target is not None and all(clause.relation in relations(a, b) for a in chosen for b in target)
        groups.append(chosen if right else None)
    return groups


def surest(found: Objects, threshold: float) -> dict[str, list[Detection]]:
    """Return the objects above `threshold`, at most MOST_OBJECTS of a class, the most confident first."""
    ordered = {name: sorted(many, key=lambda o: -o.score) for name, many in found.items()}
    return {name: [o for o in many if o.score > threshold][:MOST_OBJECTS] for name, many in ordered.items()}


def crop(image: torch.Tensor, detection: Detection) -> torch.Tensor:
    """Cut a detection's box, at least one pixel, out of a picture (3, H, W); GREY replaces what lies outside its mask."""
    height, width = image.shape[1:]
    left, top, right, bottom = (round(edge) for edge in detection.box)
    left, top = min(max(left, 0), width - 1), min(max(top, 0), height - 1)
    if detection.mask is not None:
        image = torch.where(detection.mask, image, GREY)
    return image[:, top : max(bottom, top + 1), left : max(right, left + 1)]
