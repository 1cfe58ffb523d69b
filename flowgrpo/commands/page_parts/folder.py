"""Read a run's config and log for its pages, and turn errors of a damaged folder into an InputError."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flowgrpo.data.yaml_maps import read_map
from flowgrpo.errors import InputError
from rewards.files.media import MediaError


def read_config(folder: Path) -> dict[str, Any]:
    """Return the resolved config of a run, empty for a folder of samples; raise InputError if it is damaged."""
    return read_map(folder / "config.yaml") if (folder / "config.yaml").is_file() else {}


def read_log(folder: Path) -> list[str]:
    """Return the lines of log.txt, which holds warnings; none without the file."""
    log = folder / "log.txt"
    return log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else []


def trained_weights(lora: dict[str, Any] | None) -> str:
    """Return which weights of the model are trained, in words."""
    if lora is None:
        return "full"
    path = lora.get("path")
    if path is None:
        return f"LoRA rank {lora['rank']}"
    return f"LoRA from {path if isinstance(path, str) else ', '.join(path.values())}"


@contextmanager
def input_errors(folder: Path) -> Iterator[None]:
    """Turn errors of reading a folder, which may hold anything, into an InputError."""
    try:
        yield
    except MediaError as error:
        raise InputError(f"{folder}: {error}") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{folder}: its config.yaml or metrics.jsonl is not of a run ({error!r})") from error
