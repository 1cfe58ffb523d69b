"""Memory in which a client leaves a request for a reward server on the same machine: faster than a socket by far.

It is a file without a path (memfd), which the server opens through /proc: that needs the same user and the same process
identifiers, and where they are others, as in another container or behind a tunnel, requests travel as a body. A random name
says which memory is meant, so that nobody can have a file or another's memory read. It ends with the process that made it.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterable

import numpy as np

HEADER = "Shared-Memory"  # of a request: PROCESS DESCRIPTOR NAME SIZE, instead of a body
POSSIBLE = hasattr(os, "memfd_create")  # on Linux


class Memory:
    """Memory of this process, written again and again."""

    def __init__(self):
        name = f"flowgrpo-{secrets.token_hex(16)}"
        self._file = open(os.memfd_create(name), "wb")  # noqa: SIM115, closed where nobody refers to it any more
        self._place = f"{os.getpid()} {self._file.fileno()} {name}"

    def write(self, parts: Iterable[bytes | memoryview]) -> str:
        """Write parts of bytes one behind another from the start, and say where: the value of `HEADER`."""
        self._file.seek(0)
        self._file.writelines(parts)
        self._file.flush()
        return f"{self._place} {self._file.tell()}"


def read(place: str, most: int) -> np.ndarray:
    """What `Memory.write` wrote, in this process or another.

    Raises:
        ValueError: there is no such memory, it cannot be reached from here, it is too short, or larger than `most` bytes.
    """
    named = re.fullmatch(r"(\d{1,10}) (\d{1,10}) (flowgrpo-[0-9a-f]{32}) (\d{1,19})", place, re.ASCII)
    if named is None:
        raise ValueError("that is no place of shared memory")
    process, descriptor, name, size = named[1], named[2], named[3], int(named[4])
    if size > most:
        raise ValueError(f"the shared memory may have {most} bytes at most")
    try:
        found = os.open(f"/proc/{process}/fd/{descriptor}", os.O_PATH)  # whatever it is, this has no effect on it
        try:
            own = f"/proc/self/fd/{found}"
            if os.readlink(own) != f"/memfd:{name} (deleted)":
                raise ValueError("there is no such shared memory")
            data = np.fromfile(own, np.uint8, size)
        finally:
            os.close(found)
    except OSError as error:
        raise ValueError(f"the shared memory cannot be read here ({error.strerror})") from None
    if len(data) != size:
        raise ValueError(f"the shared memory has {len(data)} bytes, not {size}")
    return data
