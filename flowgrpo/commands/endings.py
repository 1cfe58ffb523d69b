"""How commands end that do not come to their end: what is said then, and with which status."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import typer

from flowgrpo.commands import launch
from flowgrpo.commands.remedies import remedy
from flowgrpo.commands.terminal import say
from flowgrpo.schema.imports.heavy import torch
from flowgrpo.schema.sections import RunConfig
from flowgrpo.training.run.out_of_memory import OutOfMemory, last_resort
from flowgrpo.training.run.stop_reasons import DiskFull, RanOutOfMemory, Stopped, is_lost

AS_ASKED = "run.resume=auto"  # which goes on as true does, and is said again where it was said
MAY_BE_ALONE = (DiskFull, RanOutOfMemory)  # which one process can meet and the main one not


@contextmanager
def stops_told(path: Path, overrides: Sequence[str]) -> Iterator[None]:
    """Say why a run stopped and how to go on with it, in one line.

    Args:
        path, overrides: of its command.

    Raises:
        typer.Exit: with its status.
    """
    try:
        yield
    except Stopped as stopped:
        replaced = tuple(f"{written.partition('=')[0]}=" for written in (*stopped.overrides, "run.resume="))
        kept = [written for written in overrides if not written.startswith(replaced)]
        end = [AS_ASKED if word == "run.resume=true" and AS_ASKED in overrides else word for word in stopped.overrides]
        command = shlex.join([*launch.command(), "train", str(path), *kept, *end])
        if launch.is_main() or isinstance(stopped, MAY_BE_ALONE):
            say(f"{stopped}; {stopped.rest} with: {command}")
            if isinstance(stopped, RanOutOfMemory) and torch.cuda.is_available():
                room = torch.cuda.get_device_properties(0).total_memory // 2**30
                planned = shlex.join(["flowgrpo", "plan", str(path), *overrides, "--gpu-memory", str(room)])
                say(f"what each switch spares on this GPU says: {planned}")
        raise typer.Exit(stopped.status) from None
    except RuntimeError as error:
        if not is_lost(error):
            raise
        if launch.is_main():
            say("flowgrpo: another process of this run has ended, so this one ends too")
        raise typer.Exit(launch.LOST) from None


@contextmanager
def advised(settings: RunConfig) -> Iterator[None]:
    """Add what helps most to an error of memory that ran out."""
    try:
        yield
    except OutOfMemory as error:
        error.remedy = remedy(error.phase, settings) or last_resort(error.phase)
        raise


@contextmanager
def remedied(options: Mapping[str, bool]) -> Iterator[None]:
    """Add the first option of a command that would spare memory to an error of memory that ran out.

    Args:
        options: from the one that helps most, and whether each is left to be set.
    """
    try:
        yield
    except OutOfMemory as error:
        error.remedy = next((option for option, left in options.items() if left), last_resort(error.phase))
        raise
