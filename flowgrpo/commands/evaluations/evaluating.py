"""`flowgrpo evaluate`: the options of the command, and what it prints."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowgrpo import config
from flowgrpo.commands import options
from flowgrpo.commands.evaluations.results import ASKED, is_evaluation
from flowgrpo.commands.samples.sampling import is_config
from flowgrpo.commands.terminal import Format, out, print_json, print_line
from flowgrpo.data import run_folders
from flowgrpo.data.evaluation import sets
from flowgrpo.errors import InputError
from flowgrpo.training.run import run_folder
from rewards.base import nearest

if TYPE_CHECKING:
    from rich.table import Table

    from flowgrpo.commands.evaluations.comparing import Compared
    from flowgrpo.commands.evaluations.results import Results
    from flowgrpo.commands.evaluations.statistics import Statistic

FOLDER = Path("evaluations")
OWN = "a run's own held-out numbers are of its first eval.prompts prompts, and of samples before they are rounded and saved"
OVERRIDE = re.compile(r"[A-Za-z_][\w.]*=")


def evaluate(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL|CONFIG|RUN|DIR|KEY=VALUE",
            help="what to evaluate, and config keys to set; DIR is a finished evaluation; several are compared",
        ),
    ],
    *,
    name: Annotated[
        str | None,
        typer.Option(
            "--set",
            metavar="NAME",
            help=f"{', '.join(sets.SETS)}; or your own prompts, as in `flowgrpo sample --prompts`; default: a run's",
        ),
    ] = None,
    reward: Annotated[
        list[str] | None,
        typer.Option(
            "--reward",
            metavar="REWARD",
            help="use this reward instead of the set's or the run's, as in `flowgrpo score`; can be repeated",
        ),
    ] = None,
    by: Annotated[
        str | None, typer.Option("--by", metavar="COLUMN", help="column of the prompts that names their category")
    ] = None,
    samples: Annotated[
        int | None, typer.Option("--samples", min=1, help="samples of each prompt; by default the set's number")
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit", metavar="N", min=1, help="number of prompts, spread evenly over the set; by default all"
        ),
    ] = None,
    step: options.Step = None,
    out_folder: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="folder to write, for one model; by default evaluations/SET/NAME"),
    ] = None,
    batch_size: options.SampleBatch = 16,
    form: Format = "human",
) -> None:
    """Sample the prompts of an evaluation set, score the samples, and write a page with means and errors by category."""
    targets, overrides = split_words(words)
    models = [word for word in targets if not is_evaluation(Path(word))]
    begun = next((Path(word) for word in models if run_folder.is_begun(Path(word))), None)
    uses: Sequence[Any] = reward or []
    notes: list[str] = []
    if begun is not None:
        own = config.of_run(begun)
        if not uses and (name is None or sets.find_set(name) is None):
            uses = [*own.rewards, *own.eval_rewards]
        name = name or own.prompts.eval
        notes = [OWN] if name == own.prompts.eval else []
    if models and name is None:
        _refuse_missing(models)
        raise InputError(f"--set: name an evaluation set, {nearest('', sets.SETS)}; or a file of prompts")
    if name is not None and sets.find_set(name) is None and not uses:
        _refuse_missing(models)
        sets.own_set(name, by, [])  # raises
    given = {"--set": name, "--by": by, "--reward": reward, "--samples": samples, "--limit": limit, "--step": step}
    idle = [key for key, value in {**given, "KEY=VALUE": overrides or None}.items() if value is not None]
    if not models and idle:
        raise InputError(
            f"{targets[0]}: its evaluation is done, there is nothing to set; leave {' and '.join(idle)} out"
        )
    if out_folder is not None and (len(targets) > 1 or not models):
        raise InputError("--out: it is the folder of one model's evaluation, and here are several, or one that is done")
    from flowgrpo.commands.evaluations.targets import find_target

    found = [find_target(word, overrides, step) for word in targets]
    from flowgrpo.commands.evaluations.evaluation import evaluate as run
    from flowgrpo.commands.evaluations.page import write_page
    from flowgrpo.commands.evaluations.planning import plan_evaluation, read_request
    from flowgrpo.commands.evaluations.results import read_results
    from flowgrpo.commands.exit_status import suggest_option

    plans: list[Any] = [None] * len(found)
    if name is not None:
        request = read_request(name, by=by, uses=uses, samples=samples, limit=limit, batch_size=batch_size)
        place = FOLDER / (Path(name).stem if Path(name).is_file() else Path(name).name.replace(":", "-"))
        folders = [out_folder or place / target.name for target in found]
        for folder in folders:
            if folders.count(folder) > 1:
                raise InputError(
                    f"{folder}: two of the models would be evaluated there; evaluate each alone, with --out"
                )
        plans = [
            None if target.done else plan_evaluation(request, target, folder)
            for target, folder in zip(found, folders, strict=True)
        ]
    results = []
    for target, plan in zip(found, plans, strict=True):
        if target.done:
            results.append(read_results(target.done))
            continue
        with suggest_option({f"--batch-size {batch_size // 2}": batch_size > 1, "model.dtype=bfloat16": True}):
            results.append(run(plan))
        write_page(results[-1:])
    _report(results, form, write_page(results), notes)


def split_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the targets and the overrides (key=value) among the words of a command; raise InputError without a target."""
    overrides = [word for word in words if OVERRIDE.match(word)]
    targets = [word for word in words if word not in overrides]
    if not targets:
        raise InputError("name a model, a config, a run or the folder of an evaluation before KEY=VALUE")
    return targets, overrides


def _refuse_missing(words: Sequence[str]) -> None:
    """Raise InputError if a word names no built-in model or config and no folder that exists, and can be no hub id."""
    from flowgrpo.commands.model_kinds import kind_of

    for word in words:
        folder = Path(word)
        if folder.exists() or is_config(word):
            continue
        if word.count("/") > 1 or ("/" in word and folder.parent.is_dir()):
            raise InputError(f"{word}: there is no such folder{run_folders.hint(folder, ASKED, run_folders.CONFIG)}")
        if "/" not in word:
            kind_of(word)  # raises, unless it is a built-in model


def _report(results: Sequence[Results], form: str, page: Path, notes: Sequence[str]) -> None:
    from flowgrpo.commands.evaluations.comparing import compare, document, letter, restrict, sentences
    from flowgrpo.commands.evaluations.evaluation import summary

    if form == "json":
        summaries = [{**summary(each), "folder": str(each.folder)} for each in results]
        if len(results) == 1:
            print_json({**summaries[0], "page": str(page)})
        else:
            common = restrict(results)
            differences = document(common, compare(common))
            print_json({"evaluations": summaries, "differences": differences, "page": str(page)})
        return
    common = restrict(results)
    compared = compare(common)
    letters = [letter(i) for i in range(len(results))]
    if len(results) > 1:
        for name, each in zip(letters, results, strict=True):
            print_line(f"{name}  {each.asked['name']}  {each.folder}")
        for numbers in compared:
            print_line(f"\n{numbers.reward}")
            out.print(comparison_table(numbers, letters))
    else:
        out.print(table(compared))
    for sentence in (*sentences(common, results, compared), *notes):
        print_line(sentence)
    print_line(str(page))


def table(compared: Sequence[Compared]) -> Table:
    """Return the means of one evaluation's rewards, with standard errors, by category."""
    from rich.table import Column, Table

    shown = Table("", Column("prompts", justify="right"), *(numbers.reward for numbers in compared), box=None)
    rows = {row.name: row for numbers in compared for row in numbers.rows}
    for name in rows:
        found = [{row.name: row.statistics[0] for row in numbers.rows}.get(name) for numbers in compared]
        cells = [_cell(numbers, each) for numbers, each in zip(compared, found, strict=True)]
        shown.add_row(_indented(name, rows), str(max(each.n for each in found if each)), *cells)
    return shown


def comparison_table(numbers: Compared, letters: Sequence[str]) -> Table:
    """Return the means of one reward in several evaluations, and differences with the errors of pairs."""
    from rich.table import Column, Table

    heads = [*letters, *(f"{letter} − {letters[0]}" for letter in letters[1:])]
    shown = Table("", Column("prompts", justify="right"), *heads, box=None)
    names = [row.name for row in numbers.rows]
    for row in numbers.rows:
        count = max(each.n for each in row.statistics if each)
        cells = [
            *(_cell(numbers, each) for each in row.statistics),
            *(_cell(numbers, each, "+") for each in row.differences),
        ]
        shown.add_row(_indented(row.name, names), str(count), *cells)
    return shown


def _indented(name: str, names: Sequence[str] | dict[str, Any]) -> str:
    from flowgrpo.commands.evaluations.statistics import parent

    return name if parent(name, names) is None else f"  {name}"


def _cell(numbers: Compared, each: Statistic | None, sign: str = "") -> str:
    if each is None:
        return "none"
    return numbers.write(each.mean, sign) + ("" if each.error is None else f" ± {numbers.write(each.error)}")
