"""Digests of a checkpoint's files, by which a resume knows that each is as it was written, to the last byte.

They stand in `state.json`: of every other file under `files`, and at its end its own, over the rest of it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ALGORITHM = "sha256"
STATE = "state.json"
# What `state.json` held before there were digests; one with nothing else is of a checkpoint that has none.
EARLIER = {"step", "updates", "beta", "history", "sound"}


def of_files(paths: Iterable[Path]) -> dict[str, str]:
    """The digests of files, by their names."""
    return {path.name: _of_file(path) for path in paths}


def sealed(state: Mapping[str, Any], files: Mapping[str, str]) -> str:
    """The text of `state.json`: a state with the digests of all other files, by their names."""
    return _sealed({**state, "files": dict(sorted(files.items()))})


def check_state(written: bytes, state: Mapping[str, Any]) -> None:
    """Refuse a `state.json` that is not what `sealed` returned.

    Args:
        written: the file's content.
        state: what it says.

    Raises:
        ValueError: some of it has changed.
    """
    if state.keys() <= EARLIER:
        return
    content = {key: value for key, value in state.items() if key != "digest"}
    if _sealed(content).encode() != written:
        raise ValueError(f"its {STATE} is not as it was written")


def check_files(folder: Path, state: Mapping[str, Any]) -> None:
    """Refuse files that are not as they were when `sealed` wrote down their digests; without digests nothing is refused.

    Raises:
        ValueError: one is missing, or its content is another.
        OSError: one cannot be read.
    """
    for name, digest in state.get("files", {}).items():
        if not (folder / name).is_file():
            raise ValueError(f"its {name} is missing")
        if _of_file(folder / name) != digest:
            raise ValueError(f"its {name} is not as it was written")


def _sealed(content: Mapping[str, Any]) -> str:
    digest = hashlib.new(ALGORITHM, json.dumps(content).encode()).hexdigest()
    return json.dumps({**content, "digest": digest})


def _of_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, ALGORITHM).hexdigest()
