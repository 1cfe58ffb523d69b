"""Folders of runs near a path, for error messages."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

RUNS = "runs"  # the default of run.dir
CONFIG = "config.yaml"


def hint(folder: Path, mark: str = CONFIG) -> str:
    """Return the end of an error message: the run below a folder, beside it or in `runs` whose path is nearest; or "".

    `mark` is a file that the folders hold; for runs it is their config.
    """
    places = (folder, folder.parent, Path(RUNS))
    runs = {str(file.parent): None for place in places for file in sorted(place.glob(f"*/{mark}"))}
    close = [*get_close_matches(str(folder), runs, 1), *runs]
    return f", did you mean {close[0]!r}?" if close else ""
