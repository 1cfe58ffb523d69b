"""Copy the files that a run is made from into `inputs/` of its folder."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flowgrpo.data import config_paths, corpora, tables
from flowgrpo.schema.sections import RunConfig
from flowgrpo.training.run.run_folder import replace_text

FOLDER, LIST = "inputs", "files.jsonl"
LARGEST = 16 << 20  # bytes of a file that is copied


def keep(run: Path, settings: RunConfig, source: Path | None) -> None:
    """Copy the config file `source`, the prompts and the code that a run is made from into its folder.

    `inputs/files.jsonl` has a line for each file: `key` of the config, `path`, `bytes`, time `modified`, `sha256`, and
    the name of its `copy`. The last two are null above `LARGEST` bytes. A resumed run adds changed files.
    """
    folder = run / FOLDER
    folder.mkdir(exist_ok=True)
    lines = [line for _, line in tables.log(folder / LIST)]
    for key, path in _files(settings, source):
        line = _line(key, path)
        if all(_content(line) != _content(other) for other in lines):
            copy = None if line["sha256"] is None else _copy(path, line["sha256"], folder)
            lines.append({**line, "copy": copy})
    replace_text(folder / LIST, "".join(json.dumps(line) + "\n" for line in lines))


def _files(settings: RunConfig, source: Path | None) -> Iterator[tuple[str, Path]]:
    if source is not None:
        yield "config", source
    for split in ("train", "eval"):
        asked = getattr(settings.prompts, split)
        if corpora.is_corpus(asked):
            for file in corpora.files(asked, settings.prompts.folder, f"prompts.{split}"):
                yield f"prompts.{split}", file
    for named in config_paths.paths(settings.model_dump()):
        is_corpus, is_model = bool(named.before), named.place.startswith("model.")
        if named.sure and not is_corpus and not is_model and Path(named.path).is_file():
            yield named.place, Path(named.path)


def _line(key: str, path: Path) -> dict[str, Any]:
    size, modified = path.stat().st_size, datetime.fromtimestamp(path.stat().st_mtime, UTC).isoformat()
    digest = _digest(path) if size <= LARGEST else None
    return {"key": key, "path": str(path), "bytes": size, "modified": modified, "sha256": digest}


def _content(line: Mapping[str, Any]) -> tuple[Any, ...]:
    if line["sha256"] is not None:
        return line["key"], line["sha256"]
    return line["key"], Path(line["path"]).name, line["bytes"], line["modified"]


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _copy(path: Path, digest: str, folder: Path) -> str:
    """Copy a file under its name, numbered if other content has that name; return the name of the copy."""
    name, number = path.name, 1
    while name == LIST or ((folder / name).exists() and _digest(folder / name) != digest):
        number += 1
        name = f"{path.stem}-{number}{path.suffix}"
    shutil.copyfile(path, folder / name)
    return name
