"""Groups of samples on disk: final latents, and a table of prompts, seeds and rewards.

A folder is written in parts: `latents-00000.safetensors` and its rows `part-00000.parquet`. At the end the rows are
merged into `groups.parquet`, and `manifest.json` marks the folder as complete. An incomplete folder is continued after
its last complete part.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, takewhile
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors import torch as safetensors_torch

from flowgrpo.data import prompts, tables
from flowgrpo.data.prompts import Prompt
from flowgrpo.errors import InputError
from flowgrpo.schema.sections import RunConfig
from rewards.base import nearest
from samplers.kernels import State

MANIFEST, BEGUN, TABLE, PART = "manifest.json", "begun.json", "groups.parquet", "part-{:05d}.parquet"
FORMAT = 1
WRITTEN = ("rewards", "files", "model", "fingerprint", "dtype", "call")  # keys of a manifest
SHARD = 64 << 20  # bytes of latents per part
KEY = "data.groups"
REWARD = "reward/"  # prefix of reward columns
COLUMNS = {  # of the table, beside the rewards
    "group": "int64",
    "member": "int64",
    "file": "string",
    "row": "int64",
    "prompt": "string",
    "columns": "string",
    "seed": "int64",
    "lost": "bool_",
}


@dataclass(frozen=True, kw_only=True)
class Group:
    """K samples of one prompt."""

    prompt: Prompt
    seeds: Sequence[int]  # of the samples
    rewards: torch.Tensor  # (K, R) float64, NaN if not applicable or lost
    lost: torch.Tensor  # (K,) whether any reward failed


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A complete folder of stored groups."""

    folder: Path
    manifest: Mapping[str, Any]  # describes the model, the call and the files
    groups: Sequence[Group]  # in order
    places: Sequence[tuple[str, int]]  # latents file of each group, and the row of its first sample

    @property
    def rewards(self) -> list[str]:
        """Names of the rewards, in the order of their columns."""
        return self.manifest["rewards"]

    def latents(self, members: Sequence[tuple[int, int]]) -> State:
        """Return final latents, tensors (B, ...), of (group, member) indices. Raises InputError if a file cannot be read."""
        by_file: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for at, (group, member) in enumerate(members):
            file, first = self.places[group]
            by_file[file].append((at, first + member))
        rows: dict[int, State] = {}
        for file, wanted in by_file.items():
            try:
                with safetensors.safe_open(self.folder / file, "pt") as opened:
                    slices = [opened.get_slice(name) for name in sorted(opened.keys())]
                    rows |= {at: tuple(each[row] for each in slices) for at, row in wanted}
            except (OSError, safetensors.SafetensorError, IndexError) as error:
                raise InputError(f"{KEY}: {self.folder / file} cannot be read ({error})") from None
        return tuple(torch.stack(column) for column in zip(*(rows[at] for at in range(len(members))), strict=True))


class Writer:
    """Writer of a folder of groups, which continues an incomplete folder.

    Raises InputError if the folder is complete, holds other samples, or pyarrow is missing. `about` is a JSON
    description of the samples; an incomplete folder must have the same. `rewards` names the reward columns.
    """

    def __init__(self, folder: Path, about: Mapping[str, Any], rewards: Sequence[str]):
        self.folder, self._rewards = folder, list(rewards)
        self._about = {"format": FORMAT, **json.loads(json.dumps(about)), "rewards": self._rewards}
        self._waiting: list[tuple[Group, State]] = []
        check_parquet("--groups", folder)
        if (folder / MANIFEST).exists():
            raise InputError(f"--groups {folder}: holds groups already ({MANIFEST}), choose another folder")
        if (folder / BEGUN).exists():
            _check_same(folder, tables.document(folder / BEGUN), self._about)
        elif folder.exists() and any(folder.iterdir()):
            raise InputError(f"--groups {folder}: holds other files, choose another folder")
        folder.mkdir(parents=True, exist_ok=True)
        _write_atomically(folder / BEGUN, lambda path: path.write_text(json.dumps(self._about, indent=1) + "\n"))
        self._rows = self._read_parts()
        self._parts = len({row["file"] for row in self._rows})
        self.done = len({row["group"] for row in self._rows})  # groups on disk

    @property
    def number(self) -> int:
        """Number of groups, written or waiting."""
        return self.done + len(self._waiting)

    def add(self, groups: Sequence[tuple[Group, State]]) -> None:
        """Add groups with latents (K, ...), and write a part once it is large enough. Prompt columns must be JSON."""
        self._waiting += [(group, tuple(x.detach().cpu() for x in latents)) for group, latents in groups]
        if sum(x.nbytes for _, latents in self._waiting for x in latents) >= SHARD:
            self._flush()

    def finish(self, found: Mapping[str, Any]) -> dict[str, Any]:
        """Write the remaining groups, the table and the manifest; return the manifest, which includes `found`."""
        self._flush()
        files = list(dict.fromkeys(row["file"] for row in self._rows))
        sizes = {file: (self.folder / file).stat().st_size for file in files}
        manifest = {**self._about, **json.loads(json.dumps(found)), "files": sizes}
        _write_atomically(self.folder / TABLE, lambda path: _write_table(self._rows, path))
        _write_atomically(self.folder / MANIFEST, lambda path: path.write_text(json.dumps(manifest, indent=1) + "\n"))
        for path in (self.folder / BEGUN, *self.folder.glob("part-*.parquet")):
            path.unlink()
        return manifest

    def _read_parts(self) -> list[dict[str, Any]]:
        """Return the rows of the complete parts: those with a table, since it is written after the part's latents."""
        rows: list[dict[str, Any]] = []
        for path in takewhile(Path.exists, (self.folder / PART.format(number) for number in count())):
            rows += [row for _, row in tables.rows(path, "--groups")]
        return rows

    def _flush(self) -> None:
        if not self._waiting:
            return
        file = f"latents-{self._parts:05d}.safetensors"
        rows: list[dict[str, Any]] = []
        for number, (group, _) in enumerate(self._waiting, start=self.done):
            try:
                columns = json.dumps(group.prompt.columns)
            except (TypeError, ValueError) as error:
                raise InputError(
                    f"prompts: a column of {group.prompt.text[:40]!r} cannot be stored ({error})"
                ) from None
            for member, (seed, values, lost) in enumerate(
                zip(group.seeds, group.rewards.tolist(), group.lost.tolist(), strict=True)
            ):
                rewards = {REWARD + n: None if v != v else v for n, v in zip(self._rewards, values, strict=True)}
                place = {"group": number, "member": member, "file": file, "row": len(rows)}
                text = {"prompt": group.prompt.text, "columns": columns, "seed": seed, "lost": bool(lost)}
                rows.append(place | text | rewards)
        latents = [torch.cat(column).contiguous() for column in zip(*(x for _, x in self._waiting), strict=True)]
        tensors = {f"latents.{i:02d}": x for i, x in enumerate(latents)}
        _write_atomically(self.folder / file, lambda path: safetensors_torch.save_file(tensors, path))
        _write_atomically(self.folder / PART.format(self._parts), lambda path: _write_table(rows, path))
        self._rows += rows
        self._parts += 1
        self.done, self._waiting = self.number, []


def read(folder: Path, key: str = KEY) -> Stored:
    """Read a complete folder of groups. Raises InputError, naming `key`, if it is incomplete or a file's size is wrong."""
    if not (folder / MANIFEST).is_file():
        cut = (
            "was cut off before it was whole; repeat the command flowgrpo sample that began it"
            if (folder / BEGUN).is_file()
            else ""
        )
        raise InputError(
            f"{key}: {folder} {cut or f'holds no groups, it has no {MANIFEST}; flowgrpo sample writes some'}"
        )
    manifest = tables.document(folder / MANIFEST)
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise InputError(f"{key}: {folder / MANIFEST} is not a manifest of groups of format {FORMAT}")
    if missing := [name for name in WRITTEN if name not in manifest]:
        raise InputError(f"{key}: {folder / MANIFEST} has no {missing[0]!r}, which flowgrpo sample writes")
    for file, size in manifest["files"].items():
        if Path(file).name != file:
            raise InputError(f"{key}: {folder / MANIFEST} names {file!r}, which is not a file of that folder")
        actual = (folder / file).stat().st_size if (folder / file).is_file() else None
        if actual != size:
            raise InputError(f"{key}: {folder / file} has {'no' if actual is None else actual} bytes, not {size}")
    by_number: dict[int, list[dict[str, Any]]] = defaultdict(list)
    columns = [*COLUMNS, *(REWARD + name for name in manifest["rewards"])]
    for place, row in tables.rows(folder / TABLE, key):
        if missing := [name for name in columns if name not in row]:
            raise InputError(f"{place}: the row has no {missing[0]!r}, which flowgrpo sample writes")
        if row["file"] not in manifest["files"]:
            raise InputError(f"{place}: its latents are in {row['file']!r}, which {MANIFEST} does not name")
        by_number[row["group"]].append(row)
    rows = [sorted(by_number[number], key=lambda row: row["member"]) for number in sorted(by_number)]
    groups = [_group(group, manifest["rewards"]) for group in rows]
    places = [(group[0]["file"], group[0]["row"]) for group in rows]
    return Stored(folder=folder, manifest=manifest, groups=groups, places=places)


def train_prompts(config: RunConfig) -> list[Prompt]:
    """Return the training prompts: those of the stored groups, or of `prompts.train`."""
    if config.stored_groups is None:
        return prompts.load_split(config.prompts, "train")
    return [group.prompt for group in read(Path(config.stored_groups)).groups]


def check_parquet(key: str, path: Path) -> None:
    """Raise InputError if pyarrow is not installed."""
    try:
        import pyarrow  # noqa: F401 - only to see whether it is installed
    except ModuleNotFoundError:
        raise InputError(f"{key}: {path} needs pyarrow to be written, pip install 'flowgrpo[parquet]'") from None


def column_of(names: Sequence[str], name: str, key: str) -> int:
    """Return the index of a reward's column. Raises InputError if there is no such reward."""
    if name not in names:
        raise InputError(f"{key}: the stored groups have no reward {name!r}, {nearest(name, names)}")
    return list(names).index(name)


def _group(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Group:
    values = [[torch.nan if row[REWARD + name] is None else row[REWARD + name] for name in names] for row in rows]
    return Group(
        prompt=Prompt(rows[0]["prompt"], json.loads(rows[0]["columns"])),
        seeds=[row["seed"] for row in rows],
        rewards=torch.tensor(values, dtype=torch.float64).view(len(rows), len(names)),
        lost=torch.tensor([row["lost"] for row in rows]),
    )


def _check_same(folder: Path, before: Any, now: Mapping[str, Any]) -> None:
    before = before if isinstance(before, dict) else {}
    for key in dict.fromkeys([*before, *now]):
        if before.get(key) != now.get(key):
            raise InputError(
                f"--groups {folder}: was begun with {key} {_short(before.get(key))}, which is {_short(now.get(key))} now; "
                "go on as it was begun, or choose another folder"
            )


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _write_table(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    of_rewards = [(name, pyarrow.float64()) for name in rows[0] if name.startswith(REWARD)]
    schema = pyarrow.schema([(name, getattr(pyarrow, kind)()) for name, kind in COLUMNS.items()] + of_rewards)
    parquet.write_table(pyarrow.Table.from_pylist(list(rows), schema=schema), path)


def _write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    partial = path.with_name(f"{path.name}.partial")
    write(partial)
    os.replace(partial, path)
