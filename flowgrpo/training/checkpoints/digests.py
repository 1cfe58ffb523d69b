"""Digests of a checkpoint's files. `state.json` holds them: key `files` for the other files, key `digest` for itself."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

STATE = "state.json"
EARLIER = {"step", "updates", "beta", "history", "sound"}  # all keys of a `state.json` without digests


def hash_files(paths: Iterable[Path]) -> dict[str, str]:
    """Return the SHA-256 digests of files, by file name."""
    return {path.name: _hash_file(path) for path in paths}


def seal(state: Mapping[str, Any], files: Mapping[str, str]) -> str:
    """Return the text of `state.json`: the state, the digests of all other files, and its own digest."""
    return _add_digest({**state, "files": dict(sorted(files.items()))})


def check_state(written: bytes, state: Mapping[str, Any]) -> None:
    """Raise ValueError if `written`, the bytes of `state.json`, do not match its digest. A state without digest passes."""
    if state.keys() <= EARLIER:
        return
    content = {key: value for key, value in state.items() if key != "digest"}
    if _add_digest(content).encode() != written:
        raise ValueError(f"its {STATE} is not as it was written")


def check_files(folder: Path, state: Mapping[str, Any]) -> None:
    """Raise ValueError if a file is missing or does not match its digest in `state`. Files without a digest pass."""
    for name, digest in state.get("files", {}).items():
        if not (folder / name).is_file():
            raise ValueError(f"its {name} is missing")
        if _hash_file(folder / name) != digest:
            raise ValueError(f"its {name} is not as it was written")


def _add_digest(content: Mapping[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    return json.dumps({**content, "digest": digest})


def _hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
