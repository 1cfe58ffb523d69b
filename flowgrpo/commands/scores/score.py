"""`flowgrpo score`: score pictures, videos, sounds and texts in files."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.table import Column, Table

from flowgrpo.commands.scores.rewards import options_of
from flowgrpo.commands.terminal import say
from flowgrpo.data import conditions, run_folders, tables, yaml_maps
from flowgrpo.errors import InputError
from flowgrpo.schema.readable import counted
from flowgrpo.schema.sections import RewardUse
from flowgrpo.schema.validation import checked
from flowgrpo.training.reports.progress import open_display
from flowgrpo.training.run.out_of_memory_error import OutOfMemory
from flowgrpo.training.run.phases import phase
from flowgrpo.training.run.run_files import check_inside, read_manifest
from rewards import Reward, RewardError, load
from rewards.audio import Films, join_samples, tensors
from rewards.base import describe_error
from rewards.compute import default_device
from rewards.files import media, suffixes
from rewards.memory import is_out_of_memory
from samplers.batches import batched

BATCH = 16
NAMED = 3  # files whose names are given when files are left out
Sample = torch.Tensor | Films | str


@dataclass(frozen=True)
class File:
    """A file to score: its name relative to the folder, its prompt and further columns."""

    name: str
    prompt: str
    columns: dict[str, Any]

    def at_rate(self, sampling_rate: int | None) -> File:
        """Return the file with the column `sampling_rate`; None returns it as it is."""
        added = {} if sampling_rate is None else {"sampling_rate": sampling_rate}
        return replace(self, columns={**self.columns, **added})


def load_rewards(
    uses: Sequence[str], *, dtype: str | None = None, batch_size: int | None = None, device: str | None = None
) -> list[Reward]:
    """Load rewards onto a device, by default the first GPU; each text is a name as in a config, or a map in braces.

    `dtype` and `batch_size` become options of every reward that takes them, unless its map sets them.

    Raises:
        InputError: a map is wrong, or no reward takes the dtype.
        RewardError: there is no such reward, or it cannot be loaded.
    """
    rewards, took_dtype = [], False
    for use in map(read_use, uses):
        given = {"dtype": dtype, "batch_size": batch_size}
        given = {name: value for name, value in given.items() if value is not None}
        taken = (options_of(use.use) or {}) if given else {}
        took_dtype |= "dtype" in taken
        options = {**{name: value for name, value in given.items() if name in taken}, **use.options}
        rewards.append(load(use.use, options=options, name=use.name, frames=use.frames, of=use.of))
    if dtype is not None and not took_dtype:
        raise InputError(f"--dtype: {' and '.join(reward.name for reward in rewards)} takes none, leave it out")
    for reward in rewards:
        reward.to(device or default_device())
    return rewards


def read_use(text: str) -> RewardUse:
    """Return the reward that a text names, a name as in a config or a map in braces; raise InputError if it is wrong."""
    use = checked(RewardUse, yaml_maps.parse_yaml(text, "REWARD") if text.startswith("{") else text, "REWARD")
    if ignored := {"only", "weight"} & use.model_fields_set:
        raise InputError(f"{use.use}: {min(ignored)} belongs into the config of a run; here each reward is told alone")
    return use


def score_folder(folder: Path, rewards: Sequence[Reward], batch_size: int = BATCH) -> list[dict[str, Any]]:
    """Score every sample of a folder in batches of `batch_size`; group-wise rewards get all files of a prompt at once.

    Prompts and columns come from manifest.jsonl; without it a file's name is its prompt, with `_` for a space. A line
    on stderr names files that are left out. Returns a row per file with `file`, `prompt` and `rewards`, a map from
    names to numbers, None where a reward does not apply.
    """
    files = list_files(folder)
    scores: list[dict[str, float | None]] = [{} for _ in files]
    for reward in rewards:
        with open_display(), phase(f"scoring by {reward.name}", len(files)) as scoring:
            for values in score_files(folder, files, reward, batch_size):
                for i, value in values.items():
                    scores[i][reward.name] = value
                scoring.advance(len(values))
    for name in (reward.name for reward in rewards):
        if all(values[name] is None for values in scores):
            say(f"{name}: it applies to none of the samples; it may need columns that they lack, or other prompts")
    if sentence := describe_unscored(folder, files):
        say(f"--samples: {sentence}")
    return [
        {"file": file.name, "prompt": file.prompt, "rewards": values}
        for file, values in zip(files, scores, strict=True)
    ]


def score_files(
    folder: Path, files: Sequence[File], reward: Reward, batch_size: int = BATCH
) -> Iterator[dict[int, float | None]]:
    """Yield the scores of files by their indices, after each call of the reward; see `score_folder`."""
    for indices in batches(files, reward.group_wise, batch_size):
        samples, rates = zip(*(read(folder / files[i].name, heard=reward.hears) for i in indices), strict=True)
        known = {i: files[i].at_rate(rate) for i, rate in zip(indices, rates, strict=True)}
        for alike in _by_shape(indices, samples, reward):
            values = _score(reward, [known[i] for i in alike], list(alike.values()))
            yield dict(zip(alike, values, strict=True))


def table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return the rows of `score_folder` and their means as a table."""
    names = list(rows[0]["rewards"])
    table = Table(Column("file", overflow="fold"), Column("prompt", overflow="fold"), *names, box=None, padding=(0, 2))
    for row in rows:
        table.add_row(row["file"], row["prompt"], *(_cell(row["rewards"][name]) for name in names))
    known = [[row["rewards"][name] for row in rows if row["rewards"][name] is not None] for name in names]
    table.add_row("mean", counted(len(rows), "sample"), *(_cell(sum(xs) / len(xs) if xs else None) for xs in known))
    return table


def _cell(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}"


def list_files(folder: Path) -> list[File]:
    """Return the files of a folder, by its manifest or by their names; raise InputError if none exists or one is missing."""
    if not folder.is_dir():
        raise InputError(f"--samples: there is no folder {folder}{run_folders.nearest_file(folder)}")
    if lines := read_manifest(folder):
        return [_file_of(folder, line) for line in lines]
    names = sorted(path.name for path in folder.iterdir() if _is_sample(path.name))
    for name in names:
        check_inside(folder, name, "--samples")
    if not names:
        nothing = f"--samples: {folder} holds no manifest.jsonl and no picture, video or sound"
        raise InputError("; ".join(filter(None, (nothing, describe_unscored(folder, [])))))
    return [File(name, Path(name).stem.replace("_", " "), {}) for name in names]


def describe_unscored(folder: Path, files: Sequence[File]) -> str | None:
    """Return a sentence on the files that are not scored, except hidden ones; None if there are none.

    Beside a manifest only samples count, because a run writes other files too.
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


def _file_of(folder: Path, line: Mapping[str, Any]) -> File:
    name, place = line["file"], folder / "manifest.jsonl"
    if suffixes.suffix_of(name) not in suffixes.MEDIA | suffixes.TEXTS:
        raise InputError(f"{place}: {name} is no sample, only {conditions.KINDS} and .json are read; convert it to one")
    if not os.path.isfile(folder / name):
        raise InputError(f"{place}: there is no file {folder / name}")
    columns = {key: value for key, value in line.items() if key not in ("file", "prompt", "rewards")}
    return File(name, line["prompt"], columns)


def batches(files: Sequence[File], group_wise: bool, batch_size: int = BATCH) -> list[list[int]]:
    """Return the indices of files in each batch: all of one prompt for a group-wise reward, else `batch_size`."""
    if not group_wise:
        return [list(batch) for batch in batched(range(len(files)), batch_size)]
    by_prompt = defaultdict(list)
    for i, file in enumerate(files):
        by_prompt[file.prompt].append(i)
    return list(by_prompt.values())


def _by_shape(indices: Sequence[int], samples: Sequence[Sample], reward: Reward) -> list[dict[int, Sample]]:
    """Group samples by shape; each group maps indices of files to samples."""
    by_shape: defaultdict[str, dict[int, Sample]] = defaultdict(dict)
    for i, sample in zip(indices, samples, strict=True):
        parts = () if isinstance(sample, str) else tensors(sample)
        by_shape[" with ".join(str(tuple(part.shape)) for part in parts)][i] = sample
    if reward.group_wise and len(by_shape) > 1:
        raise InputError(
            f"--samples: {reward.name} compares the samples of a prompt, but here they have the shapes "
            f"{' and '.join(by_shape)}"
        )
    return list(by_shape.values())


def _score(reward: Reward, files: Sequence[File], samples: Sequence[Sample]) -> list[float | None]:
    names = dict.fromkeys(name for file in files for name in file.columns)
    columns = {name: [file.columns.get(name) for file in files] for name in names}
    texts = [sample for sample in samples if isinstance(sample, str)]
    others = [sample[None] for sample in samples if not isinstance(sample, str)]
    try:
        values = reward(texts or join_samples(others), [file.prompt for file in files], columns)
    except RewardError:
        raise
    except (Exception, SystemExit) as error:  # a plug-in may raise anything
        if is_out_of_memory(error):
            raise OutOfMemory("rewards", error, f"the reward {reward.name!r}") from error
        sentence = describe_error(error, reward.function)
        place = files[0].name if len(files) == 1 else f"one of {files[0].name} to {files[-1].name}"
        raise RewardError(f"the reward {reward.name!r} failed on {place}: {sentence}") from error
    if values.isinf().any():
        bad = files[int(values.isinf().nonzero()[0])].name
        raise RewardError(f"the reward {reward.name!r} returned NaN or infinity for {bad}, not a float or None")
    return [None if value != value else value for value in values.tolist()]


def read(path: Path, heard: bool = False) -> tuple[Sample, int | None]:
    """Return the sample of a file as rewards receive it, and its sampling rate in Hz; raise InputError if it cannot be read.

    A picture is (3, H, W) and a video (F, 3, H, W), float32 in [0, 1]; audio is (C, N) in [-1, 1]. If it is `heard`, a
    video is `Films`. A .json file gives its field `text`; it has the fields of `flowgrpo.training.reports.samples.Text`.
    """
    suffix = suffixes.suffix_of(path)
    if suffix in suffixes.TEXTS:
        document = tables.document(path)
        if not isinstance(document, dict) or not isinstance(document.get("text"), str):
            raise InputError(
                f"--samples: {path} is not a text as flowgrpo sample writes them, an object with the key text"
            )
        return document["text"], None
    if heard and suffix not in suffixes.FILMS:
        raise InputError(f"--samples: {path} is no film with sound, which are {', '.join(sorted(suffixes.FILMS))}")
    try:
        pixels = None if suffix in suffixes.SOUNDS else torch.from_numpy(media.pixels(path))
        if pixels is not None and not heard:
            return pixels, None
        rate, sound = conditions.sound(str(path))
        return sound if pixels is None else Films(pixels, sound), rate
    except media.MediaError as error:
        raise InputError(f"--samples: {error}") from error
