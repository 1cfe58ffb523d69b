"""Lock of a run's folder, and checks of folders before expensive work."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

from flowgrpo.errors import InputError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # no space on the disk, for this user, or for this file
LOCK = ".lock"
CONFIG = "config.yaml"  # written when the run begins
BEGINNING = (LOCK, "start.safetensors", "engine", f"{CONFIG}.partial")  # files that may exist before


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Create and lock a run's folder for this process; delete it at exit if it is new and empty.

    The lock ends with the process. Raises InputError if another process holds it, or if the folder is not writable.
    """
    with _create(folder, "run.dir"):
        handle = _lock(folder)
        try:
            yield
        finally:
            (folder / LOCK).unlink(missing_ok=True)
            os.close(handle)


def is_empty(folder: Path) -> bool:
    """Return whether a folder is missing, or holds only files that may exist before a run begins (`BEGINNING`)."""
    return not folder.exists() or (folder.is_dir() and all(path.name in BEGINNING for path in folder.iterdir()))


def is_begun(folder: Path) -> bool:
    """Return whether a run has begun in a folder, so that its config is there."""
    return (folder / CONFIG).is_file()


def next_free_folder(folder: Path) -> Path:
    """Return the first of the sibling folders name-2, name-3, ... that is missing or empty."""
    names = (folder.with_name(f"{folder.name}-{number}") for number in count(2))
    return next(path for path in names if is_empty(path))


def check_writable(folder: Path, place: str) -> None:
    """Raise InputError, naming `place`, if files cannot be written to a folder. The folder need not exist."""
    with _create(folder, place), _one_sentence(folder, place):
        probe = folder / f".{os.getpid()}.probe"
        probe.write_bytes(b"0")
        probe.unlink()


def replace_text(path: Path, text: str) -> None:
    """Write a UTF-8 text file atomically: it has the old text or the new one, never a part."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8", errors="backslashreplace")  # for lone surrogates
    except OSError:  # the disk is full
        partial.unlink(missing_ok=True)
        raise
    os.replace(partial, path)


@contextmanager
def _create(folder: Path, place: str) -> Iterator[None]:
    with _one_sentence(folder, place):
        new = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        for path in new:
            with suppress(OSError):  # not empty
                path.rmdir()


@contextmanager
def _one_sentence(folder: Path, place: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(f"{place}: {folder} cannot be written to ({error.strerror})") from None


def _lock(folder: Path) -> int:
    """Lock a folder; return the file descriptor of its lock file, whose text is this process's id."""
    with _one_sentence(folder, "run.dir"):
        while True:
            handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                with os.fdopen(handle) as file:
                    other = file.read().strip() or "unknown"
                raise InputError(
                    f"run.name: process {other} is still running in {folder}; wait for its end, or take another run.name"
                ) from None
            if _is_there(handle, folder / LOCK):
                os.truncate(handle, 0)
                os.write(handle, str(os.getpid()).encode())
                return handle
            os.close(handle)  # the last holder deleted the file between `open` and `flock`: try again


def _is_there(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def disk_full(error: BaseException | None) -> str | None:
    """Return the system's message, such as "No space left on device", if a full disk caused an error; else None.

    Libraries wrap the system's error or quote its text, so causes and messages are searched too.
    """
    visited = set()
    while error is not None and id(error) not in visited:
        visited.add(id(error))
        if isinstance(error, OSError) and error.errno in FULL:
            return error.strerror
        quoted = re.search(r"(\w[\w ]*) \(os error (\d+)\)", str(error))  # Rust's format
        if quoted and int(quoted[2]) in FULL:
            return quoted[1]
        error = error.__cause__ or error.__context__
    return None


def disk_room(folder: Path) -> str:
    """Return the free space of the folder's disk, in words."""
    space = shutil.disk_usage(folder)
    return f"{space.free / 2**30:.2f} of {space.total / 2**30:.2f} GiB are free"
