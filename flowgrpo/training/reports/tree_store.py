"""Saved trees of a run: `trees/step-000001/` and so on hold one .json file, with pictures, for each prompt."""

from __future__ import annotations

import base64
import io
import json
import math
import shutil
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from pydantic import ConfigDict, TypeAdapter

from flowgrpo.errors import InputError
from flowgrpo.training.run.run_folder import replace_text

FILES = "[!.]*.json"  # tree files, without hidden files of macOS
QUALITY = 80
LOOP = 2000  # milliseconds of a film


@dataclass(frozen=True, kw_only=True)
class KeptNode:
    """A state of a saved tree, and the edge that leads to it."""

    __pydantic_config__ = ConfigDict(allow_inf_nan=False)

    parent: int | None  # index of the parent node; None for a root
    step: int  # number of schedule steps before it
    sigma: float  # noise level; for a text the fraction of masked tokens
    twig: bool = False  # whether the node is part of a twig, which only measures the value of a chain's state
    seed: int | None = None  # seed of a root
    picture: str | None = None  # WebP in base64
    estimated: bool = False  # whether the picture is a one-step prediction, not a sample
    rewards: tuple[float | None, ...] = ()  # rewards of the picture, in the order of `names`; empty if not scored
    total: float | None = None  # combined reward
    kernel: str | None = None  # kernel of the edge, a word with its noise level
    noise: float = 0.0  # standard deviation of the edge's step; 0 if deterministic
    trained: bool = False  # whether the method trains on the edge, or on the sample that the edge leads to
    updated: bool = False  # whether the update trained on it; False if pruned, not selected or lost
    unit: int | None = None  # credit unit of the edge
    compared: tuple[int, ...] = ()  # comparison set of the unit
    advantage: float | None = None  # advantage of the unit
    weight: float | None = None  # weight of the edge in the loss
    log_prob: float | None = None  # log-probability of the edge in the rollout, in the form of its kernel
    text: str | None = None  # canvas of a text state


@dataclass(frozen=True, kw_only=True)
class KeptTree:
    """The trees of one group in one iteration, as one list of nodes."""

    __pydantic_config__ = ConfigDict(allow_inf_nan=False)

    step: int  # the iteration, counted from 1
    group: int  # index of the group in the iteration
    prompt: str
    sigmas: tuple[float, ...]  # the schedule, descending to 0
    names: tuple[str, ...]  # names of the rewards
    size: tuple[int, int]  # width and height of a picture, pixels
    nodes: tuple[KeptNode, ...]  # parents before children


def encode_picture(frames: np.ndarray) -> str:
    """Encode frames, uint8 (F, h, w, 4), as WebP in base64 for a node; several are a film that plays in a loop."""
    buffer = io.BytesIO()
    first, *others = map(Image.fromarray, frames)
    pace = {"save_all": True, "append_images": others, "duration": LOOP // len(frames), "loop": 0} if others else {}
    first.save(buffer, "WEBP", quality=QUALITY, method=4, **pace)
    return base64.b64encode(buffer.getvalue()).decode()


def finite_or_none(value: float) -> float | None:
    """Return a number, or None (for JSON) if it is not finite."""
    return value if math.isfinite(value) else None


def merge_trees(parts: Sequence[KeptTree]) -> list[KeptTree]:
    """Merge the trees of several processes into one per group, sorted by group. Parents and units are renumbered."""
    by_group: dict[int, KeptTree] = {}
    for part in sorted(parts, key=lambda part: part.group):
        merged = by_group.get(part.group, replace(part, nodes=()))
        units = 1 + max((node.unit for node in merged.nodes if node.unit is not None), default=-1)
        moved = (
            replace(
                node,
                parent=None if node.parent is None else node.parent + len(merged.nodes),
                unit=None if node.unit is None else node.unit + units,
            )
            for node in part.nodes
        )
        by_group[part.group] = replace(merged, nodes=(*merged.nodes, *moved))
    return list(by_group.values())


class TreeFolder:
    """The folder of a run's saved trees."""

    def __init__(self, run: Path):
        self.folder = run / "trees"

    def write(self, parts: Sequence[KeptTree]) -> None:
        """Merge the trees of one iteration over processes, and write them."""
        for tree in merge_trees(parts):
            folder = self.folder / f"step-{tree.step:06d}"
            folder.mkdir(parents=True, exist_ok=True)
            replace_text(folder / f"{tree.group:04d}.json", json.dumps(_as_json(tree), allow_nan=False) + "\n")

    def forget_after(self, step: int) -> None:
        """Delete the trees of iterations after `step`."""
        for saved_step, folder in self._folders().items():
            if saved_step > step:
                shutil.rmtree(folder)

    def sizes(self) -> dict[int, int]:
        """Return the bytes of each iteration's trees, by iteration counted from 1."""
        sizes = {
            step: sum(file.stat().st_size for file in folder.glob(FILES)) for step, folder in self._folders().items()
        }
        return {step: size for step, size in sizes.items() if size}

    def read(self, steps: Collection[int] | None = None) -> list[KeptTree]:
        """Return the trees of some iterations (by default all), in order. Raises InputError if a file is damaged."""
        folders = [folder for step, folder in self._folders().items() if steps is None or step in steps]
        return [_read(file) for folder in folders for file in sorted(folder.glob(FILES))]

    def _folders(self) -> dict[int, Path]:
        numbers = {folder: folder.name.removeprefix("step-") for folder in sorted(self.folder.glob("step-*"))}
        return {int(number): folder for folder, number in numbers.items() if number.isdecimal() and folder.is_dir()}


def _as_json(tree: KeptTree) -> dict[str, Any]:
    usual = {field.name: field.default for field in fields(KeptNode)}
    nodes = [{key: value for key, value in asdict(node).items() if value != usual[key]} for node in tree.nodes]
    return {**asdict(replace(tree, nodes=())), "nodes": nodes}


def _read(file: Path) -> KeptTree:
    try:
        tree = TypeAdapter(KeptTree).validate_json(file.read_bytes())
        _check(tree)
    except (OSError, ValueError) as error:
        raise InputError(f"{file}: it is not a tree that a run kept ({' '.join(str(error).split())[:120]})") from error
    return tree


def _check(tree: KeptTree) -> None:
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
