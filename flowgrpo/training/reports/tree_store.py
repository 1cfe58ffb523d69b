"""The trees that a run keeps to be looked at: `trees/step-000001/`, a .json for each prompt, with the pictures in it."""

from __future__ import annotations

import base64
import io
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
from pydantic import ConfigDict, TypeAdapter

from flowgrpo.errors import InputError
from flowgrpo.training.run.run_folder import replace_text

FILES = "[!.]*.json"  # of trees; macOS puts hidden ones beside them
QUALITY = 80


@dataclass(frozen=True, kw_only=True)
class KeptNode:
    """A state of a tree, and the edge that led to it.

    Attributes:
        parent: its place among the nodes of its tree; None of a root.
        step: how many steps of the schedule lie before it.
        sigma: its noise level; of a text the share of its tokens that are masked.
        twig: whether it exists only to measure the state that it left.
        seed: that a root starts from; None of others.
        picture: of it, WebP in base64; None where there is none.
        estimated: whether the picture is what the model foretells in one evaluation, not a sample.
        rewards: of its picture, by the names of the tree; empty where it was not scored.
        total: of the rewards, as it is trained on; None where it is unknown.
        kernel: of the edge, as a word with its noise level.
        noise: standard deviation of the edge's step; 0 of a deterministic one.
        trained: whether the method trains on the edge, or on the sample that it leads to.
        updated: whether the update did: not where it was pruned, left out, or its reward lost.
        unit: what is compared, to which the edge belongs; None for no unit.
        compared: the set of units that it is compared in.
        advantage: of the unit.
        weight: of the edge in the loss.
        log_prob: of the edge as the rollout drew it, in the form of its kernel.
        text: of a state of a text: its canvas.
    """

    __pydantic_config__ = ConfigDict(allow_inf_nan=False)

    parent: int | None
    step: int
    sigma: float
    twig: bool = False
    seed: int | None = None
    picture: str | None = None
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
        size: width and height of a picture, pixels.
        nodes: parents before children.
    """

    __pydantic_config__ = ConfigDict(allow_inf_nan=False)

    step: int
    group: int
    prompt: str
    sigmas: tuple[float, ...]
    names: tuple[str, ...]
    size: tuple[int, int]
    nodes: tuple[KeptNode, ...]


def encoded(picture: np.ndarray) -> str:
    """A picture uint8 (h, w, 4) as a node keeps it."""
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, "WEBP", quality=QUALITY, method=4)
    return base64.b64encode(buffer.getvalue()).decode()


def known(value: float) -> float | None:
    """A number; None where it is not finite, which no file of a tree can hold."""
    return value if math.isfinite(value) else None


def joined(parts: Sequence[KeptTree]) -> list[KeptTree]:
    """What several processes have of trees as one for each group, in the order of the groups."""
    by_group: dict[int, list[KeptTree]] = defaultdict(list)
    for part in parts:
        by_group[part.group].append(part)
    return [_joined(by_group[group]) for group in sorted(by_group)]


def _joined(parts: list[KeptTree]) -> KeptTree:
    """Parts of one group as one; parents and units are numbered on."""
    nodes: list[KeptNode] = []
    for part in parts:
        first = len(nodes)
        units = 1 + max((node.unit for node in nodes if node.unit is not None), default=-1)
        for node in part.nodes:
            parent = None if node.parent is None else node.parent + first
            nodes.append(replace(node, parent=parent, unit=None if node.unit is None else node.unit + units))
    return replace(parts[0], nodes=tuple(nodes))


class TreeFolder:
    """The kept trees of a run's folder."""

    def __init__(self, run: Path):
        self.folder = run / "trees"

    def write(self, parts: Sequence[KeptTree]) -> None:
        """Write the trees of one iteration, of one or several processes."""
        for tree in joined(parts):
            folder = self.folder / f"step-{tree.step:06d}"
            folder.mkdir(parents=True, exist_ok=True)
            replace_text(folder / f"{tree.group:04d}.json", json.dumps(_written(tree), allow_nan=False) + "\n")

    def forget_after(self, step: int) -> None:
        """Drop the trees of iterations after a checkpoint's step."""
        for kept, folder in self._folders().items():
            if kept > step:
                shutil.rmtree(folder)

    def sizes(self) -> dict[int, int]:
        """The iterations, counted from 1, whose trees are kept, and the bytes of their files."""
        found = {
            step: sum(file.stat().st_size for file in folder.glob(FILES)) for step, folder in self._folders().items()
        }
        return {step: size for step, size in found.items() if size}

    def read(self, steps: Collection[int] | None = None) -> list[KeptTree]:
        """The trees of some iterations, in their order; None: of all.

        Raises:
            InputError: a file is damaged.
        """
        folders = [folder for step, folder in self._folders().items() if steps is None or step in steps]
        return [_read(file) for folder in folders for file in sorted(folder.glob(FILES))]

    def _folders(self) -> dict[int, Path]:
        """The folders of the iterations, in their order."""
        numbers = {folder: folder.name.removeprefix("step-") for folder in sorted(self.folder.glob("step-*"))}
        return {int(number): folder for folder, number in numbers.items() if number.isdecimal() and folder.is_dir()}


def _written(tree: KeptTree) -> dict[str, Any]:
    """A tree as its file has it: of each node what differs from the defaults."""
    usual = {field.name: field.default for field in fields(KeptNode)}
    nodes = [{key: value for key, value in asdict(node).items() if value != usual[key]} for node in tree.nodes]
    return {**asdict(replace(tree, nodes=())), "nodes": nodes}


def _read(file: Path) -> KeptTree:
    """A tree of a file, which may be anyone's."""
    try:
        tree = TypeAdapter(KeptTree).validate_json(file.read_bytes())
        _check(tree)
    except (OSError, ValueError) as error:
        raise InputError(f"{file}: it is not a tree that a run kept ({' '.join(str(error).split())[:120]})") from error
    return tree


def _check(tree: KeptTree) -> None:
    """Refuse what no run writes.

    Raises:
        ValueError: says what.
    """
    if not tree.nodes or tree.nodes[0].parent is not None or min(tree.size) < 1:
        raise ValueError("it has no root, or pictures without a size")
    for place, node in enumerate(tree.nodes):
        if node.parent is not None and not 0 <= node.parent < place:
            raise ValueError(f"node {place} comes before its parent")
        before = -1 if node.parent is None else tree.nodes[node.parent].step
        if not before < node.step < len(tree.sigmas):
            raise ValueError(f"node {place} is at no step of the schedule after its parent's")
        if len(node.rewards) not in (0, len(tree.names)):
            raise ValueError(f"node {place} has {len(node.rewards)} rewards of {len(tree.names)}")
        if node.picture is not None:
            base64.b64decode(node.picture, validate=True)
