"""Folders of runs near a path, for error messages."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

RUNS = "runs"  # the default of run.dir
CONFIG = "config.yaml"


def hint(folder: Path, *marks: str) -> str:
    """Return the end of an error message: the run below a folder, beside it or in `runs` whose path is nearest; or "".

    `marks` are files, of which the folders hold one; by default a run's config.
    """
    runs = _find_runs(folder, *marks)
    close = [*get_close_matches(str(folder), runs, 1), *runs]
    return f", did you mean {close[0]!r}?" if close else ""


def similar(folder: Path) -> list[str]:
    """Return the run below a folder, beside it or in `runs` that has the most similar name; [] if none is similar."""
    by_name = {Path(run).name: run for run in _find_runs(folder)}
    return [by_name[name] for name in get_close_matches(folder.name, by_name, 1)]


def _find_runs(folder: Path, *marks: str) -> list[str]:
    places = (folder, folder.parent, Path(RUNS))
    files = (file for mark in marks or (CONFIG,) for place in places for file in sorted(place.glob(f"*/{mark}")))
    return list(dict.fromkeys(str(file.parent) for file in files))
