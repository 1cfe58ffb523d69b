"""Score pictures, videos, sounds and texts that exist as files."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Column, Table

from flowgrpo.commands.scores.rewards import options_of
from flowgrpo.commands.terminal import say
from flowgrpo.data import conditions, tables, yaml_maps
from flowgrpo.errors import InputError
from flowgrpo.schema.sections import RewardUse
from flowgrpo.schema.sentences import checked
from flowgrpo.training.reports.progress import shown
from flowgrpo.training.run.out_of_memory import OutOfMemory
from flowgrpo.training.run.phases import phase
from flowgrpo.training.run.run_files import check_inside, read_manifest
from rewards import Reward, RewardError, load
from rewards.base import told
from rewards.compute import default_device
from rewards.files import media, suffixes
from rewards.memory import is_out_of_memory
from samplers.batches import batched

BATCH = 16
NAMED = 3  # files that are left out, of which the names are said
Sample = torch.Tensor | str


@dataclass(frozen=True)
class File:
    """One file to score: its name relative to the folder, its prompt, further columns."""

    name: str
    prompt: str
    columns: dict[str, Any]


def loaded(
    uses: Sequence[str], *, dtype: str | None = None, batch_size: int | None = None, device: str | None = None
) -> list[Reward]:
    """Rewards as the command line names them, on a device.

    Args:
        uses: as a config uses them; or maps, `{use: ..., options: ...}`.
        dtype, batch_size: given to every reward whose options have these names, unless its map has its own.
        device: by default the first GPU, if there is one.

    Raises:
        InputError: a map is wrong, or a dtype is given and no reward takes one.
        RewardError: there is no such reward, or it cannot be made.
    """
    rewards, took_dtype = [], False
    for text in uses:
        use = checked(RewardUse, yaml_maps.parse_yaml(text, "REWARD") if text.startswith("{") else text, "REWARD")
        if ignored := {"only", "weight"} & use.model_fields_set:
            raise InputError(
                f"{use.use}: {min(ignored)} belongs into the config of a run, score tells each reward alone"
            )
        given = {"dtype": dtype, "batch_size": batch_size}
        given = {name: value for name, value in given.items() if value is not None}
        taken = (options_of(use.use) or {}) if given else {}
        took_dtype |= "dtype" in taken
        options = {**{name: value for name, value in given.items() if name in taken}, **use.options}
        rewards.append(load(use.use, options=options, name=use.name))
    if dtype is not None and not took_dtype:
        raise InputError(f"--dtype: {' and '.join(reward.name for reward in rewards)} takes none, leave it out")
    for reward in rewards:
        reward.to(device or default_device())
    return rewards


def score_folder(folder: Path, rewards: Sequence[Reward], batch_size: int = BATCH) -> list[dict[str, Any]]:
    """Rewards of every sample of a folder, of which a reward gets `batch_size` at once.

    Prompts, and further columns, come from its manifest.jsonl; without one a file's name is its prompt, `_` for a space.
    Group-wise rewards meet all files of one prompt together. One line on stderr says which files are left out.

    Returns:
        for each file `file`, `prompt` and `rewards`, a map from names to numbers, None where a reward does not apply.

    Raises:
        InputError: there is nothing to score, or a file cannot be read.
        RewardError: a reward fails, or breaks its contract.
    """
    files = listed(folder)
    scores: list[dict[str, float | None]] = [{} for _ in files]
    for reward in rewards:
        with shown(), phase(f"scoring by {reward.name}", len(files)) as scoring:
            for indices in batches(files, reward.group_wise, batch_size):
                samples = [read(folder / files[i].name) for i in indices]
                for alike in _of_one_shape(indices, samples, reward):
                    values = _scored(reward, files, alike=alike, indices=indices, samples=samples)
                    for i, value in zip(alike, values, strict=True):
                        scores[i][reward.name] = value
                scoring.advance(len(indices))
    if said := left_out(folder, files):
        say(f"--samples: {said}")
    return [
        {"file": file.name, "prompt": file.prompt, "rewards": values}
        for file, values in zip(files, scores, strict=True)
    ]


def table(found: Sequence[Mapping[str, Any]]) -> Table:
    """What `score_folder` found, for people: a line for each file, and the means."""
    names = list(found[0]["rewards"])
    shown = Table(Column("file", overflow="fold"), Column("prompt", overflow="fold"), *names, box=None, padding=(0, 2))
    for line in found:
        shown.add_row(line["file"], line["prompt"], *(_shown(line["rewards"][name]) for name in names))
    known = [[line["rewards"][name] for line in found if line["rewards"][name] is not None] for name in names]
    shown.add_row("mean", f"{len(found)} samples", *(_shown(sum(own) / len(own) if own else None) for own in known))
    return shown


def _shown(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}"


def listed(folder: Path) -> list[File]:
    """The files of a folder, by its manifest or by their names.

    Raises:
        InputError: there is no such folder, nothing in it, or its manifest names a file that is missing or of another kind.
    """
    if not folder.is_dir():
        raise InputError(f"--samples: there is no folder {folder}")
    if lines := read_manifest(folder):
        return [_named(folder, line) for line in lines]
    names = sorted(path.name for path in folder.iterdir() if _is_sample(path.name))
    for name in names:
        check_inside(folder, name, "--samples")
    if not names:
        said = left_out(folder, [])
        nothing = f"--samples: {folder} holds no manifest.jsonl and no picture, video or sound"
        raise InputError(f"{nothing}; {said}" if said else nothing)
    return [File(name, Path(name).stem.replace("_", " "), {}) for name in names]


def left_out(folder: Path, files: Sequence[File]) -> str | None:
    """Which files of a folder are not scored, and why, without the hidden ones; None if there are none.

    Beside a manifest only files of the kinds that are read count: a run writes others.
    """
    known = {file.name for file in files} | {"manifest.jsonl"}
    names = sorted(path.name for path in folder.iterdir() if path.is_file() and path.name not in known)
    reason = f"only {conditions.KINDS} are read"
    if (folder / "manifest.jsonl").is_file():
        names = [name for name in names if _is_sample(name)]
        reason = "its manifest.jsonl does not name them"
    names = [name for name in names if not name.startswith(".")]
    if not names:
        return None
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"left out {len(names)} of the files in {folder}: {', '.join(names[:NAMED])}{more} ({reason})"


def _is_sample(name: str) -> bool:
    return conditions.is_file_name(name) and not suffixes.is_apple_double(name)


def _named(folder: Path, line: Mapping[str, Any]) -> File:
    """The file of a line of a manifest."""
    name, place = line["file"], folder / "manifest.jsonl"
    if suffixes.suffix_of(name) not in suffixes.MEDIA | suffixes.TEXTS:
        raise InputError(f"{place}: {name} is no sample, only {conditions.KINDS} and .json are read; convert it to one")
    if not os.path.isfile(folder / name):
        raise InputError(f"{place}: there is no file {folder / name}")
    columns = {key: value for key, value in line.items() if key not in ("file", "prompt", "rewards")}
    return File(name, line["prompt"], columns)


def batches(files: Sequence[File], group_wise: bool, batch_size: int = BATCH) -> list[list[int]]:
    """Indices of files that are scored together: all of one prompt for a group-wise reward, else `batch_size`."""
    if not group_wise:
        return [list(batch) for batch in batched(range(len(files)), batch_size)]
    by_prompt = defaultdict(list)
    for i, file in enumerate(files):
        by_prompt[file.prompt].append(i)
    return list(by_prompt.values())


def _of_one_shape(indices: Sequence[int], samples: Sequence[Sample], reward: Reward) -> list[list[int]]:
    by_shape = defaultdict(list)
    for i, sample in zip(indices, samples, strict=True):
        by_shape[() if isinstance(sample, str) else tuple(sample.shape)].append(i)
    if reward.group_wise and len(by_shape) > 1:
        raise InputError(
            f"--samples: {reward.name} compares the samples of a prompt, but here they have the shapes "
            f"{' and '.join(map(str, by_shape))}"
        )
    return list(by_shape.values())


def _scored(
    reward: Reward, files: Sequence[File], *, alike: list[int], indices: list[int], samples: list[Sample]
) -> list[float | None]:
    chosen = [files[i] for i in alike]
    names = dict.fromkeys(name for file in chosen for name in file.columns)
    columns = {name: [file.columns.get(name) for file in chosen] for name in names}
    batch = [samples[indices.index(i)] for i in alike]
    texts = [sample for sample in batch if isinstance(sample, str)]
    tensors = [sample for sample in batch if isinstance(sample, torch.Tensor)]
    try:
        values = reward(
            texts or torch.stack(tensors),
            [file.prompt for file in chosen],
            columns,
        )
    except RewardError:
        raise
    except (Exception, SystemExit) as error:  # a plug-in may raise anything
        if is_out_of_memory(error):
            raise OutOfMemory("rewards", error, f"the reward {reward.name!r}") from error
        said = told(error, reward.function)
        raise RewardError(f"the reward {reward.name!r} failed on {chosen[0].name}: {said}") from error
    if values.isinf().any():
        bad = chosen[int(values.isinf().nonzero()[0])].name
        raise RewardError(f"the reward {reward.name!r} returned NaN or infinity for {bad}, not a float or None")
    return [None if value != value else value for value in values.tolist()]


def read(path: Path) -> Sample:
    """A sample from a file, as rewards receive it.

    Returns:
        a picture (3, H, W) or, of several frames, a video (F, 3, H, W), float32 in [0, 1]; audio (C, N) in [-1, 1]; or a
            text, of a `.json` with the fields of `flowgrpo.training.reports.samples.Text`.

    Raises:
        InputError: it cannot be read.
    """
    suffix = suffixes.suffix_of(path)
    if suffix in suffixes.TEXTS:
        return _text(path)
    try:
        loaded = media.frames(path) if suffix in suffixes.MULTI_FRAME else conditions.loaded(str(path))
    except media.MediaError as error:
        raise InputError(f"--samples: {error}") from error
    if isinstance(loaded, torch.Tensor):
        return loaded
    frames = loaded if isinstance(loaded, list) else [loaded]
    video = torch.from_numpy(np.stack([np.asarray(frame) for frame in frames])).permute(0, 3, 1, 2).float() / 255
    return video if len(video) > 1 else video[0]


def _text(path: Path) -> str:
    written = tables.document(path)
    if not isinstance(written, dict) or not isinstance(written.get("text"), str):
        raise InputError(f"--samples: {path} is not a text as flowgrpo sample writes them, an object with the key text")
    return written["text"]
