"""Command-line signatures of `flowgrpo explain`, `report`, `watch` and `vote`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flowgrpo.commands import options
from flowgrpo.commands.scores.serve import check_packages
from flowgrpo.commands.terminal import Format, print_json, print_line, table_lines
from flowgrpo.data import run_folders
from flowgrpo.errors import InputError
from flowgrpo.training.run.run_folder import LOCK

OF_RUN = ("config.yaml", "metrics.jsonl")
Run = Annotated[Path, typer.Argument(metavar="RUN", help="folder of a run")]


def explain(
    run: Run,
    *,
    prompt: Annotated[int, typer.Option("--prompt", metavar="N", help="number of the held-out prompt, from 0")] = 0,
    seed: Annotated[
        int | None,
        typer.Option("--seed", metavar="S", min=0, help="seed of the sample; by default N, the prompt's own"),
    ] = None,
    redraws: Annotated[
        int, typer.Option("--redraws", metavar="K", min=2, help="how often to draw each step's noise again")
    ] = 16,
    chains: Annotated[
        int, typer.Option("--chains", min=3, help="samples that measure how much each step decides")
    ] = 128,
    step: options.Step = None,
    out_file: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="page to write; by default in RUN")
    ] = None,
    form: Format = "human",
) -> None:
    """Explain one sample: how much each step's noise decides, what other noise would give, and each step's credit."""
    from flowgrpo.commands.inspect import explained

    told, page = explained.explain(run, out_file, prompt=prompt, seed=seed, step=step, redraws=redraws, chains=chains)
    if form == "json":
        print_json({**told.document, "page": str(page)})
        return
    steps = [
        {"step": f"{row.step.index}", "decides": row.share, "redraws": f"±{row.spread}", "advantage": row.advantage}
        for row in told.rows
    ]
    for line in (*told.sentences, *table_lines(steps), str(page)):
        print_line(line)


def report(
    run: Run,
    out_file: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="page to write, .html or .md; by default RUN/report.html"),
    ] = None,
) -> None:
    """Write a report of a run, as a page or as Markdown: its config, its cost and its results."""
    _check(run, OF_RUN)
    file = run / "report.html" if out_file is None else out_file
    if file.suffix not in (".html", ".md"):
        raise InputError(f"--out: a report is written as .html or .md, and {file.name} ends in neither")
    from flowgrpo.commands.report import write_report

    print_line(str(write_report(run, file)))


def watch(run: Run, port: options.Port = 8200) -> None:
    """Serve the report of a run on this machine while it trains; the page refreshes itself."""
    _check(run, (*OF_RUN, LOCK))
    check_packages("watch")
    from flowgrpo.commands.inspect.watch import watch as serve_page

    serve_page(run, port)


def vote(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN|DIR ...", help="folders of runs or of samples")],
    out_file: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="file of the answers; by default votes.jsonl in the first folder"),
    ] = None,
    port: options.Port = 8300,
) -> None:
    """Ask a person which of two samples is better, on a local page; the reward `votes` learns from the answers."""
    for folder in folders:
        if not folder.is_dir():
            raise InputError(f"{folder}: there is no such folder")
    check_packages("vote")
    from flowgrpo.commands.inspect.vote import vote as ask

    ask(folders, out_file, port)


def _check(run: Path, files: tuple[str, ...]) -> None:
    if not run.is_dir():
        raise InputError(f"{run}: there is no such folder{run_folders.hint(run)}")
    if not any((run / name).exists() for name in files):
        raise InputError(
            f"{run}: it is not a run's folder, it has neither config.yaml nor metrics.jsonl{run_folders.hint(run)}"
        )
