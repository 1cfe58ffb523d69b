"""Paths in a config: prompt files, corpora, models, LoRAs and code.

Paths in a config file are searched beside the file first, then in the current folder. Paths on the command line and in
built-in configs are searched in the current folder only.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowgrpo.data import corpora, hub, tables
from flowgrpo.data.embedded import EMBEDDED
from flowgrpo.errors import InputError
from flowgrpo.schema.sections import Prompts

_CODE = re.compile(r"(?P<path>(?!https?://).+\.py)(?P<after>:\w+)?")
_PROMPT_FILES = (".txt", *tables.SUFFIXES)
_FOLDERS = ("model.path", "model.lora.path", "model.merge", "prompts.folder", "data.groups")
_TREE = "algorithm.tree.function"


@dataclass(frozen=True, kw_only=True)
class Named:
    """A path in a configuration: `holder[key]` is `before + path + after`."""

    place: str  # dotted key for errors
    holder: Any
    key: str | int
    path: str
    before: str = ""
    after: str = ""
    sure: bool = True  # whether it is certainly a path, not e.g. a hub id


def paths(written: Mapping[str, Any]) -> Iterator[Named]:
    """Yield the paths in a configuration, given as a map that need not be valid."""
    for split in ("train", "eval"):
        yield from _prompts(written, f"prompts.{split}")
    for place in _FOLDERS:
        holder, key = _holder(written, place)
        if isinstance(holder.get(key), dict):  # LoRA paths by network
            for network in holder[key]:
                yield from _folder(holder[key], network, f"{place}.{network}")
        else:
            yield from _folder(holder, key, place)
    yield from _code(*_holder(written, _TREE), _TREE)
    for section in ("rewards", "eval_rewards"):
        uses = written.get(section)
        if isinstance(uses, dict):
            yield from _code(uses, "use", section)
        elif not isinstance(uses, list):
            yield from _code(written, section, section)
        else:
            for i, use in enumerate(uses):
                place = f"{section}.{i}"
                yield from _code(use, "use", f"{place}.use") if isinstance(use, dict) else _code(uses, i, place)


def resolve(written: dict[str, Any], folder: Path) -> list[Named]:
    """Prepend `folder` in place to relative paths that exist in it; return paths found neither there nor in the cwd."""
    if folder.resolve() == Path.cwd():
        return []
    missing = []
    _write_default_folder(written, folder)
    for named in list(paths(written)):
        candidate = folder / named.path
        if Path(named.path).is_absolute():
            continue
        if os.path.exists(candidate):
            named.holder[named.key] = f"{named.before}{candidate}{named.after}"
        elif named.sure and not os.path.exists(named.path):
            missing.append(named)
    return missing


def check_found(written: Mapping[str, Any], missing: list[Named], folder: Path) -> None:
    """Raise InputError for a path that `resolve` did not find, unless an override replaced it."""
    still = {(named.place, named.path) for named in paths(written)}
    for named in missing:
        if (named.place, named.path) in still:
            raise InputError(
                f"{named.place}: there is no {named.path}, neither beside the config ({folder / named.path}) nor in the "
                "current folder"
            )


def absolute(written: dict[str, Any]) -> dict[str, Any]:
    """Make existing paths absolute, in place; return the map."""
    for named in list(paths(written)):
        if os.path.exists(named.path):
            named.holder[named.key] = f"{named.before}{Path(named.path).resolve()}{named.after}"
    return written


def _holder(written: Any, place: str) -> tuple[dict[str, Any], str]:
    """Return the map that contains a dotted key (empty if missing) and the key's last part."""
    *sections, key = place.split(".")
    for section in sections:
        written = written.get(section) if isinstance(written, dict) else None
    return written if isinstance(written, dict) else {}, key


def _write_default_folder(written: Mapping[str, Any], folder: Path) -> None:
    """Set `prompts.folder` to its default if that folder beside the config holds the requested corpus."""
    prompts, _ = _holder(written, "prompts.folder")
    sources = [prompts.get(split) for split in ("train", "eval")]
    names = [source.partition(":")[0] for source in sources if isinstance(source, str) and corpora.is_corpus(source)]
    default = Prompts.model_fields["folder"].default
    if any((folder / default / name).exists() for name in names):
        prompts.setdefault("folder", default)


def _folder(holder: dict[str, Any], key: str, place: str) -> Iterator[Named]:
    path = holder.get(key)
    if path and isinstance(path, str) and path not in EMBEDDED:
        yield Named(place=place, holder=holder, key=key, path=path, sure=path.startswith((".", "/")))


def _prompts(written: Mapping[str, Any], place: str) -> Iterator[Named]:
    holder, key = _holder(written, place)
    source = holder.get(key)
    if not isinstance(source, str) or hub.is_dataset(source) or Path(source).suffix not in _PROMPT_FILES:
        return
    name, _, path = source.partition(":")
    before, path = (f"{name}:", path) if corpora.is_corpus(source) else ("", source)
    yield Named(place=place, holder=holder, key=key, path=path, before=before)


def _code(holder: Any, key: str | int, place: str) -> Iterator[Named]:
    use = holder.get(key) if isinstance(holder, Mapping) else holder[key]
    match = _CODE.fullmatch(use) if isinstance(use, str) else None
    if match:
        yield Named(place=place, holder=holder, key=key, path=match["path"], after=match["after"] or "")
