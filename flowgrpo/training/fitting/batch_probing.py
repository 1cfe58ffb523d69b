"""How many rows a call of the model takes best here, by trying: powers of two, until they are no faster or do not fit.

A size is taken to fit if the most memory of its calls stays below `MARGIN` of what there is, so that other prompts, and what
comes later, have room. One that would not, by what the size before took, is not tried: a GPU then need not run out of
memory, and a host is not driven to where the system ends programs. Of the sizes that fit the smallest is taken that is
nearly as fast as the fastest.
"""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from flowgrpo.errors import InputError
from flowgrpo.training.reports.report import lower_peak, peak_bytes
from rewards.memory import is_out_of_memory

MARGIN = 0.9
NEARLY = 0.95  # of the rows a second of the fastest size
PATIENCE = 2  # sizes in a row that were not faster than that by more; then larger ones are not tried
LIBRARY = ctypes.CDLL(None)  # of C
clock = time.perf_counter


@dataclass(frozen=True)
class Timed:
    """A kind of calls that samples are made of, or learned from.

    Attributes:
        calls: how many a sample takes part in.
        call: make one of so many rows.
    """

    calls: float
    call: Callable[[int], object]


@dataclass(frozen=True, kw_only=True)
class Tried:
    """A size, and what its calls took on the slowest and the fullest process.

    Attributes:
        seconds: of all calls that its rows take part in.
        peak: bytes.
    """

    rows: int
    seconds: float
    peak: int

    @property
    def rate(self) -> float:
        """Rows in a second."""
        return self.rows / self.seconds


def taken_bytes(device: torch.device) -> int:
    """Bytes that a device, or this process on the host, has now."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return psutil.Process().memory_info().rss


def free_bytes(device: torch.device, processes: int) -> int:
    """Bytes that a process can still take of its device's memory, or of its part of the host's.

    Args:
        processes: of the run on this host, which take of its memory alike.
    """
    if device.type != "cuda":
        return psutil.virtual_memory().available // processes
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


class Memory:
    """The memory of a process's device, or of the host where that computes, to try calls of one kind in.

    Where a host tells no more than the most that the process ever had, calls that stay below that fit.

    Args:
        reserved: bytes that are not taken yet, but will be.
        processes: as of `free_bytes`.
    """

    def __init__(self, device: torch.device, reserved: int = 0, processes: int = 1):
        self._device = device
        self._seen: list[tuple[int, int]] = []  # rows of the last two sizes, and their bytes above what is taken now
        self._taken = self._before = taken_bytes(device)
        self._room = int(MARGIN * free_bytes(device, processes)) - reserved

    def holds(self, rows: int) -> bool:
        """Whether calls of so many rows should fit, by what fewer took; True where nobody knows.

        One size alone does not tell what a call takes whatever its rows, as gradients of all weights: a GPU then tries two.
        """
        if not self._seen or (len(self._seen) == 1 and rows <= 2 and self._device.type == "cuda"):
            return True
        fewer, least = self._seen[0] if len(self._seen) > 1 else (0, 0)
        last, most = self._seen[-1]
        return most + (most - least) / (last - fewer) * (rows - last) <= self._room

    def begin(self) -> None:
        """Look at what is taken from here on."""
        lower_peak(self._device)
        if self._device.type != "cuda":
            self._before = peak_bytes(self._device)

    def look(self, rows: int) -> tuple[int, bool]:
        """The most bytes that were taken so far, by calls of so many rows, and whether that leaves the margin."""
        peak = peak_bytes(self._device)
        if peak <= self._before:
            self._seen = []
            return peak, True
        self._seen = [*self._seen[-1:], (rows, peak - self._taken)]
        return peak, peak - self._taken <= self._room

    def free(self) -> None:
        """Give back what nobody holds, of a failed call too."""
        free(self._device)

    def give_back(self) -> None:
        """Give a device back what is kept of it for later."""
        give_back(self._device)


def free(device: torch.device) -> None:
    """Give a device, or the host, back what nobody holds."""
    gc.collect()
    give_back(device)


def give_back(device: torch.device) -> None:
    """Give a device, or the host, back what is kept of it for later."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif hasattr(LIBRARY, "malloc_trim"):  # glibc's
        LIBRARY.malloc_trim(0)


@dataclass(frozen=True, kw_only=True)
class Prober:
    """What is tried where.

    Attributes:
        memory: of this process.
        everyone: the list of what each process has to say; all ask together.
        clear: forget what a call has left behind.
        alone: whether calls are of this process alone, so that one of them may run out of memory without the others.
    """

    memory: Memory
    everyone: Callable[[Any], list[Any]]
    clear: Callable[[], None]
    alone: bool

    def fits(self, timed: Sequence[Timed], rows: int) -> Tried | None:
        """What calls of so many rows took; None where they do not fit, on any of the processes.

        Raises:
            Exception: a call failed, or ran out of memory in the middle of what others wait for.
        """
        if not all(self.everyone(self.memory.holds(rows))):
            return None
        told = self.everyone(self._tried(timed, rows))
        if None in told:
            return None
        return Tried(rows=rows, seconds=max(each[0] for each in told), peak=max(each[1] for each in told))

    def sizes(self, timed: Sequence[Timed], most: int) -> list[Tried]:
        """Sizes from one row to the last power of two that is not above `most`, as far as they fit and are worth trying."""
        found: list[Tried] = []
        for rows in powers(most):
            tried = self.fits(timed, rows)
            if tried is None:
                break
            found.append(tried)
            if rows >= best(found).rows << PATIENCE:
                break
        return found

    def largest(self, timed: Sequence[Timed], rows: int) -> int:
        """`rows`, or the first half, quarter and so on of it that fits; 1 if none does.

        They are tried from the smallest on, so that what is too large is seen by what smaller ones took.
        """
        most = 1
        for size in sorted(rows >> halved for halved in range(rows.bit_length() - 1)):
            if self.fits(timed, size) is None:
                break
            most = size
        return most

    def _tried(self, timed: Sequence[Timed], rows: int) -> tuple[float, int] | None:
        """Seconds and the most bytes of calls on this process; None where they do not fit."""
        self.memory.begin()
        seconds = None
        try:
            seconds = sum(each.calls * self._seconds(each.call, rows) for each in timed)
        except Exception as error:
            if not (self.alone and is_out_of_memory(error)):
                raise
        finally:
            self.clear()
        peak, fits = self.memory.look(rows)
        if seconds is not None and fits:
            return seconds, peak
        self.memory.free()
        return None

    def _seconds(self, call: Callable[[int], object], rows: int) -> float:
        """Of the faster of two calls, with what the device has left to do then."""
        each = []
        for _ in range(2):
            started = clock()
            call(rows)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            each.append(max(clock() - started, 1e-9))
            self.clear()
        return min(each)


def powers(most: int) -> Iterator[int]:
    """1, 2, 4 and so on, up to `most`."""
    rows = 1
    while rows <= most:
        yield rows
        rows *= 2


def best(tried: Sequence[Tried], key: str = "train.micro_batch") -> Tried:
    """The smallest of the sizes that are nearly as fast as the fastest.

    Raises:
        InputError: there is none, for not even one row fits.
    """
    if not tried:
        raise InputError(
            f"{key}: not even one row of the longest prompt fits with a margin of {1 - MARGIN:.0%}; spare memory "
            f"(flowgrpo plan --gpu-memory says how), or set {key}=1"
        )
    fastest = max(each.rate for each in tried)
    return min((each for each in tried if each.rate >= NEARLY * fastest), key=lambda each: each.rows)
