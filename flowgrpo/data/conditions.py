"""Conditions: load files named in prompt rows as pipeline inputs `image`, `video`, `audio` and so on."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flowgrpo.errors import InputError
from rewards.files import media, suffixes

KINDS = ", ".join(suffixes.MEDIA)
# Usual names of pipelines' conditions.
COLUMNS = ("image", "images", "control_image", "last_image", "mask_image", "video", "audio")
FILES_KEPT = 64  # decoded files in the cache


def is_file_name(value: Any) -> bool:
    """Return whether a value names a picture, a video or a sound."""
    return isinstance(value, str) and suffixes.suffix_of(value) in suffixes.MEDIA


def resolve_files(value: Any, folder: Path) -> Any:
    """Make existing file names in a value absolute; they are relative to `folder`."""
    if isinstance(value, list):
        return [resolve_files(item, folder) for item in value]
    return str((folder / value).resolve()) if is_file_name(value) and os.path.isfile(folder / value) else value


def load_file(value: Any) -> Any:
    """Load the files that a value names: RGB PIL images, lists of them (video), or float32 (C, N) audio in [-1, 1]."""
    if isinstance(value, list):
        return [load_file(item) for item in value]
    return _read(value) if is_file_name(value) else value


def check(columns: Iterable[Mapping[str, Any]], taken: Collection[str], key: str) -> None:
    """Open each file that rows name in the `taken` columns. Raises InputError, naming `key`, if one cannot be used."""
    given = [(name, value) for row in columns for name, value in row.items() if name in taken]
    values = [(name, one) for name, value in given for one in (value if isinstance(value, list) else [value])]
    for column, value in dict.fromkeys((n, v) for n, v in values if n in COLUMNS and isinstance(v, str)):
        if not is_file_name(value):
            raise InputError(
                f"{key}: {column} is {value[:80]!r}, but of files only {KINDS} are read; convert it to one"
            )
    for name in dict.fromkeys(value for _, value in values if is_file_name(value)):
        if "://" in name:
            raise InputError(f"{key}: {name} is an address, not a file; download it first")
        try:
            _read(name)
        except media.MediaError as error:
            raise InputError(f"{key}: {error}") from error


def _read(name: str) -> Any:
    return _decode(name, os.stat(name).st_mtime_ns if os.path.exists(name) else None)


@lru_cache(maxsize=FILES_KEPT)
def _decode(name: str, modified: int | None) -> Any:
    """Decode a file. Its modification time is part of the cache's key, so that a changed file is decoded again."""
    suffix = suffixes.suffix_of(name)
    if suffix in suffixes.SOUNDS:
        return sound(name)[1]
    return media.frames(name) if suffix in suffixes.ANIMATIONS | suffixes.FILMS else media.picture(name)


def sound(name: str) -> tuple[int, torch.Tensor]:
    """Return the sampling rate of a sound, or of a film's sound, and its values, float32 (C, N) in [-1, 1]."""
    rate, samples = media.sound(name)
    values = np.atleast_2d(samples.T).astype(np.float32)
    if samples.dtype == np.uint8:  # 8-bit zero is 128
        values = (values - 128) / 128
    elif np.issubdtype(samples.dtype, np.integer):
        values /= -float(np.iinfo(samples.dtype).min)
    return rate, torch.from_numpy(values)
