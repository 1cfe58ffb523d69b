"""Probing of batch sizes: try powers of two until they are no faster or do not fit into memory.

A size fits if the peak memory of its calls stays below `MARGIN` of the free memory, which leaves room for other prompts
and later allocations. A size that will not fit, by a prediction from the smaller sizes, is not tried. Of the sizes that
fit, the smallest that is nearly as fast as the fastest is chosen.
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
NEARLY = 0.95  # a size is nearly as fast as the fastest from this fraction of its rows per second
PATIENCE = 2  # stop after so many doublings beyond the best size
LIBRARY = ctypes.CDLL(None)  # the C library
clock = time.perf_counter


@dataclass(frozen=True)
class Timed:
    """A kind of model call in a rollout or an update, to be timed."""

    calls: float  # number of such calls that each sample takes part in
    call: Callable[[int], object]  # makes one call with the given number of rows


@dataclass(frozen=True, kw_only=True)
class Tried:
    """Time and memory of a batch size."""

    rows: int
    seconds: float  # time of all calls that its rows take part in, on the slowest process
    peak: int  # peak memory in bytes, on the process where it is largest

    @property
    def rate(self) -> float:
        """Rows per second."""
        return self.rows / self.seconds


def used_bytes(device: torch.device) -> int:
    """Return the bytes allocated now: on a GPU by its tensors, on the host by this process."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return psutil.Process().memory_info().rss


def free_bytes(device: torch.device, processes: int) -> int:
    """Return the bytes that a process can still allocate: on its GPU, or its share of host memory among `processes`."""
    if device.type != "cuda":
        return psutil.virtual_memory().available // processes
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


class Memory:
    """Memory of a process's device during the probing of one kind of calls: peak usage by batch size, and its limit.

    On a host, the measured peak may be that of the whole life of the process. Therefore calls that stay below an earlier
    peak count as fitting. `reserved` are bytes that the run will allocate later.
    """

    def __init__(self, device: torch.device, reserved: int = 0, processes: int = 1):
        self._device = device
        self._seen: list[tuple[int, int]] = []  # the last two sizes: rows, and peak bytes above `_taken`
        self._taken = self._before = used_bytes(device)
        self._room = int(MARGIN * free_bytes(device, processes)) - reserved

    def holds(self, rows: int) -> bool:
        """Predict whether calls of `rows` rows fit, linearly from the smaller sizes; True if nothing is known.

        One size alone does not show the constant part of a call's memory, such as the gradients of all weights. So a
        GPU always tries two rows.
        """
        if not self._seen or (len(self._seen) == 1 and rows <= 2 and self._device.type == "cuda"):
            return True
        fewer, least = self._seen[0] if len(self._seen) > 1 else (0, 0)
        last, most = self._seen[-1]
        return most + (most - least) / (last - fewer) * (rows - last) <= self._room

    def begin(self) -> None:
        """Start to measure the peak."""
        lower_peak(self._device)
        if self._device.type != "cuda":
            self._before = peak_bytes(self._device)

    def look(self, rows: int) -> tuple[int, bool]:
        """Return the peak in bytes since `begin`, by calls of `rows` rows, and whether it leaves the margin."""
        peak = peak_bytes(self._device)
        if peak <= self._before:
            self._seen = []
            return peak, True
        self._seen = [*self._seen[-1:], (rows, peak - self._taken)]
        return peak, peak - self._taken <= self._room

    def free(self) -> None:
        """Free unreferenced tensors, those of a failed call too, and cached memory."""
        free(self._device)

    def give_back(self) -> None:
        """Free cached memory."""
        give_back(self._device)


def free(device: torch.device) -> None:
    """Free unreferenced tensors, and return the memory that allocators cache to the device, or to the host."""
    gc.collect()
    give_back(device)


def give_back(device: torch.device) -> None:
    """Return the memory that allocators cache to the device, or to the host."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif hasattr(LIBRARY, "malloc_trim"):  # glibc only
        LIBRARY.malloc_trim(0)


@dataclass(frozen=True, kw_only=True)
class Prober:
    """Trials of batch sizes. All processes call each method together."""

    memory: Memory
    everyone: Callable[[Any], list[Any]]  # gathers a value of each process into a list; a collective call
    clear: Callable[[], None]  # drops the gradients that a call has left
    alone: bool  # whether each process makes its calls alone, so that one may run out of memory without the others

    def fits(self, timed: Sequence[Timed], rows: int) -> Tried | None:
        """Try calls of `rows` rows; return their time and memory, or None if they do not fit on some process.

        Raises the error of a failed call; also out of memory, if several processes make the call together.
        """
        if not all(self.everyone(self.memory.holds(rows))):
            return None
        results = self.everyone(self._try(timed, rows))
        if None in results:
            return None
        return Tried(rows=rows, seconds=max(each[0] for each in results), peak=max(each[1] for each in results))

    def sizes(self, timed: Sequence[Timed], most: int) -> list[Tried]:
        """Try the powers of two up to `most`, and return those that fit, ascending.

        It stops at the first size that does not fit, or when the last `PATIENCE` sizes were no faster.
        """
        fitting: list[Tried] = []
        for rows in powers(most):
            tried = self.fits(timed, rows)
            if tried is None:
                break
            fitting.append(tried)
            if rows >= best(fitting).rows << PATIENCE:
                break
        return fitting

    def largest(self, timed: Sequence[Timed], rows: int) -> int:
        """Return the largest of `rows`, its half, its quarter and so on that fits, tried in ascending order; else 1."""
        most = 1
        for size in sorted(rows >> halved for halved in range(rows.bit_length() - 1)):
            if self.fits(timed, size) is None:
                break
            most = size
        return most

    def _try(self, timed: Sequence[Timed], rows: int) -> tuple[float, int] | None:
        """Return the seconds and the peak bytes of calls on this process; None if they do not fit."""
        self.memory.begin()
        seconds = None
        try:
            seconds = sum(each.calls * measure_seconds(each.call, rows, self.clear) for each in timed)
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


def measure_seconds(call: Callable[[int], object], rows: int, clear: Callable[[], None]) -> float:
    """Return the seconds of the faster of two calls with `rows` rows, each measured until the GPU has finished.

    `clear` drops the gradients that a call has left.
    """
    each = []
    for _ in range(2):
        started = clock()
        call(rows)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        each.append(max(clock() - started, 1e-9))
        clear()
    return min(each)


def powers(most: int) -> Iterator[int]:
    """Yield 1, 2, 4 and so on, up to `most`."""
    rows = 1
    while rows <= most:
        yield rows
        rows *= 2


def best(tried: Sequence[Tried], key: str = "train.micro_batch") -> Tried:
    """Return the smallest size that is nearly as fast as the fastest.

    Raises InputError, which names the config key `key`, if there is no size, since not even one row fits.
    """
    if not tried:
        raise InputError(
            f"{key}: not even one row of the longest prompt fits with a margin of {1 - MARGIN:.0%}; save memory "
            f"(flowgrpo plan --gpu-memory shows how), or set {key}=1"
        )
    fastest = max(each.rate for each in tried)
    return min((each for each in tried if each.rate >= NEARLY * fastest), key=lambda each: each.rows)
