"""A disk that is full: told from other errors, and how much of it is free."""

from __future__ import annotations

import errno
import re
import shutil
from pathlib import Path

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # no space, or no more of it for this user or this file


def full(error: BaseException | None) -> str | None:
    """What the system says of an error that a full disk has led to, such as "No space left on device"; None of any other.

    Libraries raise errors of their own for it, with the system's behind them or in their words.
    """
    seen = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, OSError) and error.errno in FULL:
            return error.strerror
        said = re.search(r"(\w[\w ]*) \(os error (\d+)\)", str(error))  # as Rust writes it
        if said and int(said[2]) in FULL:
            return said[1]
        error = error.__cause__ or error.__context__
    return None


def room(folder: Path) -> str:
    """How much of the disk that a folder lies on is free, in words."""
    space = shutil.disk_usage(folder)
    return f"{space.free / 2**30:.2f} of {space.total / 2**30:.2f} GiB are free"
