"""The commands `flowgrpo report` and `flowgrpo watch`: one page of a run, written or served."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flowgrpo.commands.serve import check_packages
from flowgrpo.commands.terminal import out
from flowgrpo.errors import InputError
from flowgrpo.training.folders import LOCK

SUFFIXES = (".html", ".md")
OF_RUN = ("config.yaml", "metrics.jsonl")
Run = Annotated[Path, typer.Argument(metavar="RUN")]


def report(
    run: Run,
    out_file: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help=".html or .md; by default RUN/report.html")
    ] = None,
) -> None:
    """Write one page, or Markdown, of what a run was asked, what it cost and what came of it."""
    _check(run, OF_RUN)
    file = run / "report.html" if out_file is None else out_file
    if file.suffix not in SUFFIXES:
        raise InputError(f"--out: a report is written as .html or .md, and {file.name} ends in neither")
    from flowgrpo.commands.report import write_report

    out.print(str(write_report(run, file)), soft_wrap=True)


def watch(
    run: Run,
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0 takes a free one")] = 8200,
) -> None:
    """Serve the report of a run that goes on, on this machine; the page refreshes itself."""
    _check(run, (*OF_RUN, LOCK))
    check_packages("watch")
    from flowgrpo.commands.watch import watch as serve_page

    serve_page(run, port)


def _check(run: Path, files: tuple[str, ...]) -> None:
    if not run.is_dir():
        raise InputError(f"{run}: there is no such folder")
    if not any((run / name).exists() for name in files):
        raise InputError(f"{run}: it is not a run's folder, it has neither config.yaml nor metrics.jsonl")
