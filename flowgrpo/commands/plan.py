"""What a run will do and cost, and whether it fits a GPU, shown before it does it."""

from __future__ import annotations

import json

from rich.table import Table

from flowgrpo import config
from flowgrpo.commands.explain import explained
from flowgrpo.commands.kinds import KINDS
from flowgrpo.commands.terminal import out
from flowgrpo.errors import InputError
from flowgrpo.schema.sections import RunConfig
from flowgrpo.training import sharding


def show(settings: RunConfig, gpu_memory: float | None, form: str) -> None:
    """Show the plan of a run.

    Args:
        gpu_memory: GiB of a GPU that it is to fit; None asks for no such thing.
        form: `human` or `json`.

    Raises:
        InputError: the config cannot be run.
    """
    sharding.check(settings)
    kind = KINDS[settings.kind]
    planned = kind.plan.plan(settings)
    try:
        fitted = None if gpu_memory is None else kind.budget.fit(settings, int(gpu_memory * 2**30))
    except NotImplementedError as error:  # as `training.live` raises it
        raise InputError(
            f"--gpu-memory: {settings.model.path} cannot be planned without its weights: {error}"
        ) from error
    if form == "json":
        print(json.dumps(planned if fitted is None else planned | {"gpu": fitted}, indent=1))
        return
    out.print(config.dumped(settings))
    for line in kind.plan.drawn(planned):
        out.print(f"  {line}", soft_wrap=True)
    table = Table("", "", show_header=False, box=None, padding=(0, 2))
    for label, words in kind.plan.table(planned):
        table.add_row(label, words)
    out.print(table)
    for line in () if fitted is None else kind.budget.lines(fitted):
        out.print(line, soft_wrap=True)


def show_meaning(settings: RunConfig, key: str, form: str) -> None:
    """Show what a key of the config means.

    Raises:
        InputError: there is no such key, or JSON is asked for.
    """
    if form == "json":
        raise InputError("--explain: it is for people, leave --format json out")
    for label, words in explained(settings, key):
        out.print(f"{label:28} {words}", soft_wrap=True)
