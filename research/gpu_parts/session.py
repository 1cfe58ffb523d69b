"""Measure parts one after the other within a time limit, and keep each result in a JSON file as soon as it is there.

The parts run in a process of their own, one for all of them as long as it lives: an illegal memory access on a GPU makes
every later call of the process fail. The part under way then gets its error, and a new process measures the others.
This module imports no PyTorch, so that the process can be forked.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BROKEN = 3  # exit status of a process whose GPU answers no more
POLL = 0.2  # seconds between two looks at the process
TIMES, MORE = 3, 60  # a part may take so many times its expected seconds, and so many more


@dataclass(frozen=True)
class Part:
    """A part of a session.

    Attributes:
        name: key of the result.
        seconds: expected on a GPU; the part begins only if as much time is left.
        measure: returns the result, as JSON values.
        gpu: whether the part needs a GPU.
    """

    name: str
    seconds: float
    measure: Callable[[], Mapping[str, Any]]
    gpu: bool = True


class Results:
    """The results of a session in a file: those of parts by name, and the part under way."""

    def __init__(self, file: Path):
        self.file = file

    def read(self) -> dict[str, Any]:
        """Return what the file holds: `parts`, each with `found` or `error` and `seconds`, and `under_way`."""
        return json.loads(self.file.read_text()) if self.file.exists() else {"parts": {}, "under_way": None}

    def begin(self, name: str) -> None:
        """Write that a part is under way."""
        self._write(self.read() | {"under_way": {"part": name, "since": time.time()}})

    def end(self, **result: Any) -> None:
        """Write the result of the part that is under way."""
        told = self.read()
        under_way = told["under_way"]
        taken = round(time.time() - under_way["since"], 2)
        parts = told["parts"] | {under_way["part"]: {**result, "seconds": taken}}
        self._write({"parts": parts, "under_way": None})

    def drop(self, *, errors: bool) -> None:
        """Write that no part is under way; with `errors`, forget failed parts."""
        parts = {name: each for name, each in self.read()["parts"].items() if not (errors and "error" in each)}
        self._write({"parts": parts, "under_way": None})

    def _write(self, told: Mapping[str, Any]) -> None:
        new = self.file.with_name(f"{self.file.name}.new")
        new.write_text(json.dumps(told, indent=1) + "\n")
        new.replace(self.file)


def run(parts: Sequence[Part], results: Results, *, minutes: float, again: bool = False) -> None:
    """Measure the parts that have no result yet, in their order, in at most `minutes`.

    A part that raises, ends its process or hangs gets an error of one sentence, and the others go on. A part that was under
    way when an earlier call was killed counts as failed. With `again`, failed parts are measured anew.
    """
    ends = time.monotonic() + 60 * minutes
    if results.read()["under_way"]:
        results.end(error="the command was killed while this was measured")
    if again:
        results.drop(errors=True)
    fork = multiprocessing.get_context("fork")
    while left := [part for part in parts if part.name not in results.read()["parts"]]:
        process = fork.Process(target=_work, args=(left, results, ends))
        process.start()
        try:
            why = _watch(process, results, ends, {part.name: part.seconds for part in left})
        finally:
            process.kill()
            process.join()
        if time.monotonic() >= ends or not (why or process.exitcode):
            results.drop(errors=False)  # what the end of the time cut off is measured by the next call
            return
        if results.read()["under_way"]:
            results.end(error=why or f"its process ended with status {process.exitcode}")
        elif process.exitcode != BROKEN:
            raise SystemExit(
                f"gpu_check: the process of the parts ended with status {process.exitcode} before one began"
            )


def _watch(process: Any, results: Results, ends: float, expected: Mapping[str, float]) -> str | None:
    """Wait until the process or the time ends, or a part hangs; return a sentence if it hangs."""
    while process.is_alive() and time.monotonic() < ends:
        process.join(POLL)
        if under_way := results.read()["under_way"]:
            most = TIMES * expected[under_way["part"]] + MORE
            if time.time() - under_way["since"] > most:
                return f"it took longer than {most:.0f} seconds"
    return None


def _work(parts: Sequence[Part], results: Results, ends: float) -> None:
    """Measure parts in this process, as long as the time suffices."""
    import torch

    for part in parts:
        if part.gpu and not torch.cuda.is_available():
            print(f"{part.name}: left out, it needs a GPU", flush=True)
            continue
        if time.monotonic() + part.seconds > ends:
            print(f"{part.name}: left for the next call, {part.seconds:.0f} seconds do not fit", flush=True)
            continue
        results.begin(part.name)
        try:
            found = part.measure()
        except Exception as error:  # of any library; the other parts go on
            results.end(error=sentence(error))
        else:
            results.end(found=found)
        print(f"{part.name}: {_told(results.read()['parts'][part.name])}", flush=True)
        if _is_broken(torch):
            sys.stdout.flush()
            os._exit(BROKEN)


def _is_broken(torch: Any) -> bool:
    """Return whether the GPU answers no more, as after an illegal memory access."""
    if not torch.cuda.is_available():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def sentence(error: BaseException) -> str:
    """Return an error as one line of at most 300 letters."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def _told(result: Mapping[str, Any]) -> str:
    return f"{result['seconds']:.1f} s" + (f", {result['error']}" if "error" in result else "")
