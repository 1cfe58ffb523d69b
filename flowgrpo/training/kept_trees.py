"""The trees that a run keeps to be looked at: `trees/step-000001/`, of each prompt a .json of its nodes and a .webp.

The .webp holds the pictures of the nodes as tiles of one size, row by row, `COLUMNS` to a row.
"""

from __future__ import annotations

import json
import math
import shutil
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from pydantic import TypeAdapter

from flowgrpo.errors import InputError
from flowgrpo.training.folders import replace_text

COLUMNS = 16  # tiles to a row
QUALITY = 80


@dataclass(frozen=True, kw_only=True)
class KeptNode:
    """A state of a tree, and the edge that led to it.

    Attributes:
        parent: its place among the nodes of its tree; None of a root.
        step: how many steps of the schedule lie before it.
        sigma: its noise level.
        role: `trunk`, or `twig` of one that exists only to measure the state that it left.
        seed: that a root starts from; None of others.
        tile: of its picture; None where there is none.
        estimated: whether the picture is the clean sample that the model foretold in one evaluation, not a sample.
        rewards: of its picture, by the names of the tree; empty where it was not scored.
        total: of the rewards, as it is trained on; None where it is unknown.
        kernel: of the edge, as a word with its noise level.
        noise: standard deviation of the edge's step; 0 of a deterministic one.
        trained: whether the plan trains on the edge.
        updated: whether the update did: not where it was pruned, or left out.
        unit: what is compared, to which the edge belongs; None for no unit.
        compared: the set of units that it is compared in.
        advantage: of the unit.
        weight: of the edge in the loss.
        log_prob: of the edge as the rollout drew it, in the form of its kernel.
        text: of a state of a text: its canvas.
    """

    parent: int | None
    step: int
    sigma: float
    role: str
    seed: int | None = None
    tile: int | None = None
    estimated: bool = False
    rewards: tuple[float | None, ...] = ()
    total: float | None = None
    kernel: str | None = None
    noise: float = 0.0
    trained: bool = False
    updated: bool = False
    unit: int | None = None
    compared: tuple[int, ...] = ()
    advantage: float | None = None
    weight: float | None = None
    log_prob: float | None = None
    text: str | None = None


@dataclass(frozen=True, kw_only=True)
class KeptTree:
    """The trees of one prompt in one iteration, as one.

    Attributes:
        step: the iteration, counted from 1.
        group: its number in the iteration.
        sigmas: the schedule, descending to 0.
        names: of the rewards.
        tile: width and height of a picture, pixels; (0, 0) without any.
        nodes: parents before children.
    """

    step: int
    group: int
    prompt: str
    sigmas: tuple[float, ...]
    names: tuple[str, ...]
    tile: tuple[int, int]
    nodes: tuple[KeptNode, ...]


@dataclass(frozen=True)
class Part:
    """What one process has of a prompt's trees: its own nodes, and their pictures, uint8 (h, w, 4)."""

    tree: KeptTree
    pictures: Sequence[np.ndarray]


def known(value: float) -> float | None:
    """A number; None where it is not finite, which no file of a tree can hold."""
    return value if math.isfinite(value) else None


def joined(parts: Sequence[Part]) -> list[Part]:
    """The parts of several processes as one for each group, in the order of the groups."""
    by_group: dict[int, list[Part]] = defaultdict(list)
    for part in parts:
        by_group[part.tree.group].append(part)
    return [_joined(by_group[group]) for group in sorted(by_group)]


def _joined(parts: list[Part]) -> Part:
    """Parts of one group as one; units, parents and tiles are numbered on."""
    nodes: list[KeptNode] = []
    pictures: list[np.ndarray] = []
    units = 0
    for part in parts:
        first = len(nodes)
        for node in part.tree.nodes:
            moved = {
                "parent": None if node.parent is None else node.parent + first,
                "tile": None if node.tile is None else node.tile + len(pictures),
                "unit": None if node.unit is None else node.unit + units,
            }
            nodes.append(replace(node, **moved))
        pictures += part.pictures
        units = 1 + max((node.unit for node in nodes if node.unit is not None), default=units - 1)
    return Part(replace(parts[0].tree, nodes=tuple(nodes)), pictures)


class TreeFolder:
    """The kept trees of a run's folder."""

    def __init__(self, run: Path):
        self.folder = run / "trees"

    def write(self, parts: Sequence[Part]) -> None:
        """Write the trees of one iteration, of one or several processes."""
        for part in joined(parts):
            folder = self.folder / f"step-{part.tree.step:06d}"
            folder.mkdir(parents=True, exist_ok=True)
            tree = part.tree
            if part.pictures:
                height, width = part.pictures[0].shape[:2]
                tree = replace(tree, tile=(width, height))
                _sheet(part.pictures).save(folder / f"{tree.group:04d}.webp", "WEBP", quality=QUALITY, method=4)
            replace_text(folder / f"{tree.group:04d}.json", json.dumps(_written(tree), allow_nan=False) + "\n")

    def forget_after(self, step: int) -> None:
        """Drop the trees of iterations after a checkpoint's step."""
        for kept, folder in self._folders().items():
            if kept > step:
                shutil.rmtree(folder)

    def sizes(self) -> dict[int, int]:
        """The iterations, counted from 1, whose trees are kept, and the bytes of their files."""
        return {
            step: sum(file.stat().st_size for file in folder.iterdir())
            for step, folder in self._folders().items()
            if any(folder.glob("*.json"))
        }

    def read(self, steps: Collection[int] | None = None) -> list[tuple[KeptTree, Path | None]]:
        """The trees of some iterations, in their order, each with the file of its pictures; None: of all.

        Raises:
            InputError: a file is damaged.
        """
        folders = [folder for step, folder in self._folders().items() if steps is None or step in steps]
        files = [file for folder in folders for file in sorted(folder.glob("*.json"))]
        return [(_read(file), sheet if (sheet := file.with_suffix(".webp")).is_file() else None) for file in files]

    def _folders(self) -> dict[int, Path]:
        """The folders of the iterations, in their order."""
        numbers = {folder: folder.name.removeprefix("step-") for folder in sorted(self.folder.glob("step-*"))}
        return {int(number): folder for folder, number in numbers.items() if number.isdecimal() and folder.is_dir()}


def _sheet(pictures: Sequence[np.ndarray]) -> Image.Image:
    """Pictures (h, w, 4) of one size as the tiles of one."""
    height, width = pictures[0].shape[:2]
    rows = -(-len(pictures) // COLUMNS)
    sheet = np.zeros((rows * height, min(len(pictures), COLUMNS) * width, 4), dtype=np.uint8)
    for place, picture in enumerate(pictures):
        row, column = divmod(place, COLUMNS)
        sheet[row * height : (row + 1) * height, column * width : (column + 1) * width] = picture
    return Image.fromarray(sheet)


def _written(tree: KeptTree) -> dict[str, Any]:
    """A tree as its file has it: of each node what differs from the defaults."""
    usual = {field.name: field.default for field in fields(KeptNode)}
    nodes = [{key: value for key, value in asdict(node).items() if value != usual[key]} for node in tree.nodes]
    return {**asdict(replace(tree, nodes=())), "nodes": nodes}


def _read(file: Path) -> KeptTree:
    """A tree of a file, which may be anyone's."""
    try:
        tree = TypeAdapter(KeptTree).validate_json(file.read_bytes())
        if not tree.nodes or tree.nodes[0].parent is not None:
            raise ValueError("its first node is not a root")
        for place, node in enumerate(tree.nodes):
            if node.parent is not None and not 0 <= node.parent < place:
                raise ValueError(f"node {place} comes before its parent")
            if not 0 <= node.step < len(tree.sigmas):
                raise ValueError(f"node {place} is at no step of the schedule")
            if node.tile is not None and (node.tile < 0 or min(tree.tile) < 1):
                raise ValueError(f"node {place} has a picture without a size")
    except (OSError, ValueError) as error:
        raise InputError(f"{file}: it is not a tree that a run kept ({' '.join(str(error).split())[:120]})") from error
    return tree
