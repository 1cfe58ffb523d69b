"""Folders of runs, and files, near a path, for error messages."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

RUNS = "runs"  # the default of run.dir
CONFIG = "config.yaml"


def hint(folder: Path, *marks: str) -> str:
    """Return the end of an error message: the run of the nearest path or name or below the folder, else some runs; or "".

    Runs are below the folder, beside it or in `runs`. `marks` are files, of which the folders hold one; by default a run's
    config.
    """
    runs = _find_runs(folder, *marks)
    below = [run for run in runs if Path(run).parent == folder]
    if close := [*get_close_matches(str(folder), runs, 1), *_similar(folder, runs), *below]:
        return f", did you mean {close[0]!r}?"
    return f"; there {'is' if len(runs) == 1 else 'are'} {', '.join(runs[:5])}" if runs else ""


def nearest_file(path: Path) -> str:
    """Return the end of an error message: the file or folder beside a path whose name is nearest; or ""."""
    names = [each.name for each in path.parent.iterdir()] if path.parent.is_dir() else []
    return "".join(f", did you mean {str(path.parent / name)!r}?" for name in get_close_matches(path.name, names, 1))


def similar(folder: Path) -> list[str]:
    """Return the run below a folder, beside it or in `runs` that has the most similar name; [] if none is similar."""
    return _similar(folder, _find_runs(folder))


def _similar(folder: Path, runs: list[str]) -> list[str]:
    by_name = {Path(run).name: run for run in runs}
    return [by_name[name] for name in get_close_matches(folder.name, by_name, 1)]


def _find_runs(folder: Path, *marks: str) -> list[str]:
    places = (folder, folder.parent, Path(RUNS))
    files = (file for mark in marks or (CONFIG,) for place in places for file in sorted(place.glob(f"*/{mark}")))
    return list(dict.fromkeys(str(file.parent) for file in files))
