"""A run's folder: one process at a time holds it, and it can be written to before anything expensive happens."""

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

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # no space, or no more of it for this user or this file

LOCK = ".lock"
CONFIG = "config.yaml"  # there from a run's beginning on
BEGINNING = (LOCK, "start.safetensors", "engine", f"{CONFIG}.partial")  # what may be there before


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Make a run's folder and lock it for this process; afterwards it is removed again if nothing was put into it.

    The kernel lets go when the process dies, however it dies, so nothing has to be cleaned up.

    Raises:
        InputError: another process holds it, or it cannot be written to.
    """
    with _made(folder, "run.dir"):
        handle = _lock(folder)
        try:
            yield
        finally:
            (folder / LOCK).unlink(missing_ok=True)
            os.close(handle)


def is_empty(folder: Path) -> bool:
    """Whether nothing is in a folder but what holds it, and what a run leaves that dies as it begins.

    One that does not exist is empty.
    """
    return not folder.exists() or (folder.is_dir() and all(path.name in BEGINNING for path in folder.iterdir()))


def is_begun(folder: Path) -> bool:
    """Whether a run has begun in a folder."""
    return (folder / CONFIG).is_file()


def free(folder: Path) -> Path:
    """The first of name-2, name-3 and so on beside a folder that nothing is in."""
    names = (folder.with_name(f"{folder.name}-{number}") for number in count(2))
    return next(path for path in names if is_empty(path))


def check_writable(folder: Path, place: str) -> None:
    """Refuse a folder that files cannot be written to; it need not be there.

    Args:
        place: named in errors.

    Raises:
        InputError: files cannot be written there.
    """
    with _made(folder, place), _one_sentence(folder, place):
        probe = folder / f".{os.getpid()}.probe"
        probe.write_bytes(b"0")
        probe.unlink()


def replace_text(path: Path, text: str) -> None:
    """Write a text file in UTF-8, all at once: whoever reads it meanwhile sees the old text or the new one, never half."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8", errors="backslashreplace")  # half a character is none
    except OSError:  # of a full disk
        partial.unlink(missing_ok=True)
        raise
    os.replace(partial, path)


@contextmanager
def _made(folder: Path, place: str) -> Iterator[None]:
    """Make a folder that is not there; afterwards it is removed again if nothing was put into it."""
    with _one_sentence(folder, place):
        new = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        for path in new:
            with suppress(OSError):  # of one that something is in
                path.rmdir()


@contextmanager
def _one_sentence(folder: Path, place: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(f"{place}: {folder} cannot be written to ({error.strerror})") from None


def _lock(folder: Path) -> int:
    """Lock a folder and return the descriptor of its lock file, which names this process."""
    with _one_sentence(folder, "run.dir"):
        while True:
            handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                with os.fdopen(handle) as file:
                    other = file.read().strip() or "unknown"
                raise InputError(
                    f"run.name: another run goes on in {folder}, process {other}; wait for its end, or take another run.name"
                ) from None
            if _is_there(handle, folder / LOCK):
                os.truncate(handle, 0)
                os.write(handle, str(os.getpid()).encode())
                return handle
            os.close(handle)  # its holder ended, and took the file away, between our two calls


def _is_there(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def disk_full(error: BaseException | None) -> str | None:
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


def disk_room(folder: Path) -> str:
    """How much of the disk that a folder lies on is free, in words."""
    space = shutil.disk_usage(folder)
    return f"{space.free / 2**30:.2f} of {space.total / 2**30:.2f} GiB are free"
