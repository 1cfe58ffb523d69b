"""Functions and runs that the same processes make in turn, where none of them needs processes of its own."""

import os
import shutil
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import NamedTuple

from accelerate.state import AcceleratorState, GradientState
from cut_back import cut_back
from pair import pair
from torch import distributed

from flowgrpo.commands.runs.train import train
from flowgrpo.errors import InputError

SECONDS = 120  # after which a process that waits for the others gives up


def each_in_turn(functions, folder, **options):
    """Return what `pair` finds for each function, an answer of each process; after an error call none."""
    found = _answers(partial(_each, functions), folder, **options)
    return {name: [of_process.get(name, "not called") for of_process in found] for name in functions}


def _answers(function, folder, **options):
    found = pair(function, folder, seconds=SECONDS, **options)
    assert all(each is not None for each in found), (
        f"of {len(found)} processes some ended before they answered: {found}"
    )
    return found


def _each(functions, rank):
    found = {}
    for name, function in functions.items():
        try:
            found[name] = function(rank)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
            break
    return found


def raised(function, error, rank):
    """The words of an error in which a function ends on every process."""
    said = None
    try:
        function(rank)
    except error as ended:
        said = str(ended)
    distributed.barrier()
    return said


class Turn(NamedTuple):
    """A run of a config in a folder; one that goes on from a source begins as that was after its first step."""

    folder: str
    config: str
    name: str
    overrides: list[str]
    source: str | None = None


def trained_in_turn(cases, folder, begin=None, **options):
    """Return how the runs of each case ended on each process: None, or an error, after all but `InputError` no run begins.

    `begin` is what each process calls first; `folder` is empty.
    """
    turns = [turn for case in cases for turn in case]
    found = iter(zip(*_answers(partial(_train, turns, str(folder), begin), folder, **options), strict=True))
    return [{turn.name: list(next(found)) for turn in case} for case in cases]


def after_first_step(folder, source, name):
    """Copy a run as it was after its first step."""
    later = shutil.copytree(folder / source, folder / name)
    if [path.name for path in (later / "checkpoints").iterdir()] != ["step-000001"]:
        cut_back(later, 1)


def _train(turns, folder, begin, rank):
    ends = []
    if begin:
        begin()
    for number, turn in enumerate(turns):
        os.chdir(turn.folder)
        try:
            _meet(rank, f"{folder}/met-{number}")
            if turn.source and rank == 0:
                after_first_step(Path("runs"), turn.source, turn.name)
            distributed.barrier()
            train(turn.config, [*turn.overrides, f"run.name={turn.name}", *["run.resume=true"] * bool(turn.source)])
        except InputError as error:  # which all processes raise
            ends.append(str(error))
        except Exception as error:
            ends.append(f"{type(error).__name__}: {error}")
            break
        else:
            ends.append(None)
    return [*ends, *["not begun"] * (len(turns) - len(ends))]


def _meet(rank, store):
    """Wait for all processes. A group that is there is kept: to leave it fails where another process is still joining it."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    if not distributed.is_initialized():
        count, patience = int(os.environ["WORLD_SIZE"]), timedelta(seconds=SECONDS)
        place = f"file://{store}"
        distributed.init_process_group("gloo", init_method=place, rank=rank, world_size=count, timeout=patience)
    distributed.barrier()
