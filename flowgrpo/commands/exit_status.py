"""Messages and exit statuses of commands that stop early."""

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
from flowgrpo.training.run.out_of_memory_error import OutOfMemory, last_resort
from flowgrpo.training.run.stop_reasons import DiskFull, RanOutOfMemory, Stopped, is_lost

RESUME_AUTO = "run.resume=auto"  # resumes a begun run too, so a command that has it keeps it
MAY_BE_ALONE = (DiskFull, RanOutOfMemory)  # one process alone may stop for these, so each process prints its own


@contextmanager
def report_stops(path: Path, overrides: Sequence[str]) -> Iterator[None]:
    """Say why `flowgrpo train PATH OVERRIDES` stopped and how to resume it, and raise `typer.Exit` with its status."""
    try:
        yield
    except Stopped as stopped:
        replaced = tuple(f"{override.partition('=')[0]}=" for override in (*stopped.overrides, "run.resume="))
        kept = [override for override in overrides if not override.startswith(replaced)]
        end = [RESUME_AUTO if o == "run.resume=true" and RESUME_AUTO in overrides else o for o in stopped.overrides]
        command = shlex.join([*launch.command(), "train", str(path), *kept, *end])
        if launch.is_main() or isinstance(stopped, MAY_BE_ALONE):
            say(f"{stopped}; {stopped.rest} with: {command}")
            if isinstance(stopped, RanOutOfMemory) and torch.cuda.is_available():
                gib = torch.cuda.get_device_properties(0).total_memory // 2**30
                plan = shlex.join(["flowgrpo", "plan", str(path), *overrides, "--gpu-memory", str(gib)])
                say(f"to see what each setting saves on this GPU: {plan}")
        raise typer.Exit(stopped.status) from None
    except RuntimeError as error:
        if not is_lost(error):
            raise
        if launch.is_main():
            say("flowgrpo: another process of this run has ended, so this one ends too")
        raise typer.Exit(launch.LOST) from None


@contextmanager
def suggest_override(settings: RunConfig) -> Iterator[None]:
    """Add the override that saves most memory to an `OutOfMemory`."""
    try:
        yield
    except OutOfMemory as error:
        error.remedy = remedy(error.phase, settings) or last_resort(error.phase)
        raise


@contextmanager
def suggest_option(options: Mapping[str, bool]) -> Iterator[None]:
    """Add the best unused option to an `OutOfMemory`. `options` tells whether each is unused, from the best to the worst."""
    try:
        yield
    except OutOfMemory as error:
        error.remedy = next((option for option, free in options.items() if free), last_resort(error.phase))
        raise
