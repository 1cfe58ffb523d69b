"""Copy the files that a run is made from into `inputs/` of its folder."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flowgrpo.commands.scores.code import code_of
from flowgrpo.data import config_paths, corpora, tables
from flowgrpo.schema.sections import RunConfig
from flowgrpo.training.run.run_folder import replace_text
from rewards.cards import default_name

FOLDER, LIST = "inputs", "files.jsonl"
LARGEST = 16 << 20  # bytes of a file that is copied


def keep(run: Path, settings: RunConfig, source: Path | None) -> list[str]:
    """Copy the config file `source`, the prompts and the code that a run is made from into its folder.

    `inputs/files.jsonl` has a line for each file: `key` of the config, `path`, `bytes`, time `modified`, `sha256`, and
    the name of its `copy`. The last two are null above `LARGEST` bytes. A reward that a module or a notebook defines has
    a line, too; its `modified` is null. A resumed run adds what has changed.

    Returns:
        Sentences about prompts and rewards of a resumed run that have changed, though their names are the same.
    """
    folder, changed = run / FOLDER, []
    folder.mkdir(exist_ok=True)
    lines = [line for _, line in tables.log(folder / LIST)]
    for key, path, content in [*_files(settings, source), *_functions(settings)]:
        line = _line(key, path, content)
        before = [other for other in lines if other["key"] == key and Path(other["path"]).name == path.name]
        if before and key != "config" and any(before[-1][part] != line[part] for part in ("bytes", "sha256")):
            changed.append(
                f"{key}: {path} has changed since the run began, so rewards before and after differ by that too"
            )
        if all(_content(line) != _content(other) for other in lines):
            copy = None if line["sha256"] is None else _copy(path, content, line["sha256"], folder)
            lines.append({**line, "copy": copy})
    replace_text(folder / LIST, "".join(json.dumps(line) + "\n" for line in lines))
    return changed


Entry = tuple[str, Path, Path | bytes]  # a key of the config, what it names, and the file or the code


def _files(settings: RunConfig, source: Path | None) -> Iterator[Entry]:
    if source is not None:
        yield "config", source, source
    for split in ("train", "eval"):
        asked = getattr(settings.prompts, split)
        if corpora.is_corpus(asked):
            for file in corpora.files(asked, settings.prompts.folder, f"prompts.{split}"):
                yield f"prompts.{split}", file, file
    for named in config_paths.paths(settings.model_dump()):
        is_corpus, is_model = bool(named.before), named.place.startswith("model.")
        if named.sure and not is_corpus and not is_model and Path(named.path).is_file():
            yield named.place, Path(named.path), Path(named.path)


def _functions(settings: RunConfig) -> Iterator[Entry]:
    """Yield the rewards that a module or a notebook defines; those of files are among the files."""
    for key in ("rewards", "eval_rewards"):
        for number, use in enumerate(getattr(settings, key)):
            in_file = use.use.endswith(".py") or use.use.rpartition(":")[0].endswith(".py")
            if not in_file and (code := code_of(use.use)) is not None:
                yield f"{key}.{number}.use", Path(use.use), code


def _line(key: str, path: Path, content: Path | bytes) -> dict[str, Any]:
    if isinstance(content, bytes):
        size, modified, digest = len(content), None, hashlib.sha256(content).hexdigest()
    else:
        size, modified = content.stat().st_size, datetime.fromtimestamp(content.stat().st_mtime, UTC).isoformat()
        digest = _digest(content) if size <= LARGEST else None
    return {"key": key, "path": str(path), "bytes": size, "modified": modified, "sha256": digest}


def _content(line: Mapping[str, Any]) -> tuple[Any, ...]:
    if line["sha256"] is not None:
        return line["key"], line["sha256"]
    return line["key"], Path(line["path"]).name, line["bytes"], line["modified"]


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _copy(path: Path, content: Path | bytes, digest: str, folder: Path) -> str:
    """Copy a file, or write code, under its name, numbered if other content has that name; return the name."""
    own = path.name if isinstance(content, Path) else f"{default_name(path.name)}.py"
    name, number = own, 1
    while name == LIST or ((folder / name).exists() and _digest(folder / name) != digest):
        number += 1
        name = f"{Path(own).stem}-{number}{Path(own).suffix}"
    if isinstance(content, Path):
        shutil.copyfile(content, folder / name)
    else:
        (folder / name).write_bytes(content)
    return name
