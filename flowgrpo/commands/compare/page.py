"""The page that compares runs: their curves on one axis, the same prompts and seeds side by side, what was set otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flowgrpo.commands.compare.differences import Difference, differences
from flowgrpo.commands.compare.matches import Match, changes, disagreements, matches, shown_steps
from flowgrpo.commands.compare.runs import Run, counts_alike, read_runs, redefined
from flowgrpo.commands.gallery.curve import HEIGHT, PART, WIDTH, Series, chart
from flowgrpo.commands.gallery.history import COSTS
from flowgrpo.commands.gallery.media import LONGEST
from flowgrpo.commands.gallery.numbers import counts, difference, minutes, number
from flowgrpo.commands.gallery.pages import template
from flowgrpo.commands.gallery.totals import name_of

# What any two runs differ in: what they are called, where they lie, and the process that started them.
UNASKED = {"settings": ("run.name", "run.dir"), "environment": ("folder", "torchrun")}
WORDS = {
    "settings": ("setting", "settings"),
    "environment": ("fact of the environment", "facts of the environment"),
}
HELD_OUT = {"prompts.eval", "eval.prompts"}  # what decides which prompts a held-out mean is of


@dataclass(frozen=True)
class Curves:
    """One mean held-out reward of all runs, as an SVG for each axis; the total has no name.

    Attributes:
        watched: the letters of the runs that do not train on it.
    """

    reward: str
    watched: list[str]
    charts: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Table:
    """What differs between the runs that have a file of the kind, and how much does not.

    Attributes:
        one: the word for a key of it.
        many: for several.
    """

    one: str
    many: str
    runs: list[Run]
    differing: list[Difference]
    agreeing: int


def comparison(folders: Sequence[Path]) -> str:
    """The page of two or more runs, or folders of samples.

    Raises:
        InputError: a folder holds no samples, or files that cannot be read.
    """
    runs = read_runs(folders)
    found = matches(runs)
    comparable = counts_alike(runs) and not redefined(runs)
    axes = _axes(runs)
    tables = [_table(runs, "settings"), _table(runs, "environment")]
    steps = shown_steps(found)
    finals = [column.final for match in found for column in match.columns if column.final]
    return template("compare.html.jinja").render(
        runs=runs,
        facts=_facts,
        axes=axes,
        curves=_curves(runs, axes, every_reward=not comparable),
        notes=_notes(runs, found, tables[0]),
        tables=[table for table in tables if table is not None],
        matches=found,
        steps=steps,
        aparts=[[match.apart(step) for step in steps] for match in found],
        disagreements=disagreements(found, comparable),
        changes=changes(found, comparable),
        comparable=comparable,
        texts=any(final.answer is not None for final in finals),
        sounds=any(final.outline is not None for final in finals),
        longest=LONGEST,
        number=number,
        difference=difference,
    )


def _facts(run: Run) -> list[str]:
    """What the head of the page says of a run beside its means: method, standard errors, what training took."""
    costs = run.costs
    errors = [number(mean.error, 2) for mean in run.means if mean.error is not None]
    return [
        *([run.method] if run.method else []),
        *([counts(*run.means)] if len({mean.count for mean in run.means}) > 1 else []),
        *([f"standard errors {' and '.join(errors)}"] if len(errors) > 1 else []),
        *([f"{costs['evaluations']:,} model evaluations", minutes(costs["seconds"])] if costs else []),
    ]


def _axes(runs: Sequence[Run]) -> list[str]:
    """What curves can be drawn over: steps, and the costs where all that have curves know them."""
    return ["step", *(COSTS if all(run.costs for run in runs if run.means) else ())]


def _curves(runs: Sequence[Run], axes: Sequence[str], every_reward: bool) -> list[Curves]:
    """Those of the total, and of each of several rewards, that a run was evaluated by twice."""
    names = list(dict.fromkeys(name for run in runs for name in (*run.trained.names, *run.watched)))
    found = []
    for name in ["", *(names if every_reward or len(names) > 1 else ())]:
        if any(len(run.held_out(name, "step")) > 1 for run in runs):
            watched = [run.letter for run in runs if name in run.watched]
            found.append(Curves(name, watched, {axis: _chart(runs, name, axis) for axis in axes}))
    return found


def _chart(runs: Sequence[Run], reward: str, axis: str) -> str:
    series = [Series(points=run.held_out(reward, axis), kind=run.kind, dotted=True, mark=run.letter) for run in runs]
    return chart(series, PART if reward else (WIDTH, HEIGHT), axis)


def _table(runs: Sequence[Run], what: str) -> Table | None:
    """What differs in an attribute of the runs, by its name; None where fewer than two have it."""
    having = [run for run in runs if getattr(run, what)]
    if len(having) < 2:
        return None
    found = differences([getattr(run, what) for run in having], UNASKED[what])
    one, many = WORDS[what]
    return Table(one=one, many=many, runs=having, differing=found.differing, agreeing=found.agreeing)


def _notes(runs: Sequence[Run], found: Sequence[Match], settings: Table | None) -> list[str]:
    """Sentences on what cannot be compared."""
    notes = []
    if not counts_alike(runs):
        counted = "; ".join(f"{run.letter}: {_counted(run)}" for run in runs)
        notes.append(
            f"The totals are of different rewards and cannot be compared ({counted}); rewards of the same name can."
        )
    notes += [
        f"{name} is set up differently in some runs, so its values cannot be compared." for name in redefined(runs)
    ]
    if settings and HELD_OUT & {each.key for each in settings.differing}:
        notes.append("The runs were evaluated on different prompts, so their means are not of the same samples.")
    silent = [run.letter for run in runs if run.means and not run.costs]
    if silent:
        notes.append(f"What training took is not known of {', '.join(silent)}, so curves are drawn by step only.")
    empty = [run.letter for run in runs if not run.cards]
    if empty:
        notes.append(f"No samples were kept of {', '.join(empty)}.")
    if found and not any(sum(column.card is not None for column in match.columns) > 1 for match in found):
        notes.append("No prompt and seed is in two of the folders, so no samples stand side by side.")
    return notes


def _counted(run: Run) -> str:
    """The rewards of a run's total with their weights."""
    uses = run.config.get("rewards", [])
    parts = [name_of(use) if use["weight"] == 1 else f"{number(use['weight'])} × {name_of(use)}" for use in uses]
    form = run.trained.form
    return ", ".join(parts) + (f" ({form})" if form != "sum" else "") if parts else "the sum of all"
