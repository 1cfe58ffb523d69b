"""The page that compares runs: curves on one pair of axes, samples side by side, and different settings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flowgrpo.commands.compare.differences import differences
from flowgrpo.commands.compare.matches import Match, changes, disagreements, matches, shown_steps
from flowgrpo.commands.compare.runs import Run, find_redefined, have_same_totals, read_runs
from flowgrpo.commands.page_parts.curve import HEIGHT, PART, WIDTH, Series, chart
from flowgrpo.commands.page_parts.history import COSTS
from flowgrpo.commands.page_parts.media import LONGEST
from flowgrpo.commands.page_parts.numbers import counts, difference, minutes, number
from flowgrpo.commands.page_parts.pages import template
from flowgrpo.commands.page_parts.totals import name_of

# Keys in which any two runs differ: their names and folders, and the process that started them.
UNASKED = {"settings": ("run.name", "run.dir"), "environment": ("folder", "torchrun")}
WORDS = {"settings": ("setting", "settings"), "environment": ("fact of the environment", "facts of the environment")}
HELD_OUT = {"prompts.eval", "eval.prompts"}  # keys that select the prompts of a held-out mean


def comparison(folders: Sequence[Path]) -> str:
    """Return the page of two or more runs or folders of samples; raise InputError if one cannot be read."""
    runs = read_runs(folders)
    rows = matches(runs)
    redefined = bool(find_redefined(runs))
    comparable = have_same_totals(runs) and not redefined
    axes = ["step", *(COSTS if all(run.costs for run in runs if run.means) else ())]
    tables = [_table(runs, "settings"), _table(runs, "environment")]
    steps = shown_steps(rows)
    columns = [column for match in rows for column in match.columns]
    finals = [column.final for column in columns if column.final]
    return template("compare.html.jinja").render(
        runs=runs,
        facts=_facts,
        axes=axes,
        curves=_curves(runs, axes, every_reward=not comparable),
        notes=_notes(runs, rows, tables[0]),
        tables=[table for table in tables if table is not None],
        matches=rows,
        steps=steps,
        rewards=list(dict.fromkeys(name for each in columns for sample in each.samples for name in sample.rewards)),
        aparts=[[match.apart(step) for step in steps] for match in rows],
        disagreements=disagreements(rows, comparable),
        changes=changes(rows, comparable),
        comparable=comparable,
        redefined=redefined,
        texts=any(final.answer is not None for final in finals),
        sounds=any(final.outline is not None for final in finals),
        longest=LONGEST,
        number=number,
        difference=difference,
    )


def _facts(run: Run) -> list[str]:
    """Return the method, the standard errors and the costs of a run, for the head of the page."""
    costs = run.costs
    errors = [number(mean.error, 2) for mean in run.means if mean.error is not None]
    return [
        *([run.method] if run.method else []),
        *([counts(*run.means)] if len({mean.count for mean in run.means}) > 1 else []),
        *([f"standard errors {' and '.join(errors)}"] if len(errors) > 1 else []),
        *([f"{costs['evaluations']:,} model evaluations", minutes(costs["seconds"])] if costs else []),
    ]


def _curves(runs: Sequence[Run], axes: Sequence[str], every_reward: bool) -> list[dict[str, Any]]:
    """Draw the held-out total over each axis, and single rewards if there are several or with `every_reward`."""
    names = list(dict.fromkeys(name for run in runs for name in (*run.trained.names, *run.watched)))
    curves = []
    for name in ["", *(names if every_reward or len(names) > 1 else ())]:
        if any(len(run.held_out(name, "step")) > 1 for run in runs):
            watched = [run.letter for run in runs if name in run.watched]
            charts = {axis: _chart(runs, name, axis) for axis in axes}
            curves.append({"reward": name, "watched": watched, "charts": charts})
    return curves


def _chart(runs: Sequence[Run], reward: str, axis: str) -> str:
    series = [Series(points=run.held_out(reward, axis), kind=run.kind, dotted=True, mark=run.letter) for run in runs]
    return chart(series, PART if reward else (WIDTH, HEIGHT), axis)


def _table(runs: Sequence[Run], attribute: str) -> dict[str, Any] | None:
    """Compare an attribute of the runs; return None if fewer than two have it."""
    having = [run for run in runs if getattr(run, attribute)]
    if len(having) < 2:
        return None
    differing, agreeing = differences([getattr(run, attribute) for run in having], UNASKED[attribute])
    one, many = WORDS[attribute]
    return {"one": one, "many": many, "runs": having, "differing": differing, "agreeing": agreeing}


def _notes(runs: Sequence[Run], rows: Sequence[Match], settings: dict[str, Any] | None) -> list[str]:
    notes = []
    if not have_same_totals(runs):
        counted = "; ".join(f"{run.letter}: {_format_weights(run)}" for run in runs if run.counted)
        notes.append(
            f"The totals are of different rewards and cannot be compared ({counted}); rewards of the same name can."
        )
    notes += [
        f"{name} is set up differently in some runs, so its values cannot be compared." for name in find_redefined(runs)
    ]
    if settings and HELD_OUT & {each.key for each in settings["differing"]}:
        notes.append("The runs were evaluated on different prompts, so their means are not of the same samples.")
    silent = [run.letter for run in runs if run.means and not run.costs]
    if silent:
        notes.append(f"What training took is not known of {', '.join(silent)}, so curves are drawn by step only.")
    empty = [run.letter for run in runs if not run.cards]
    if empty:
        notes.append(f"No samples were kept of {', '.join(empty)}.")
    if rows and not any(sum(column.card is not None for column in match.columns) > 1 for match in rows):
        notes.append("No prompt and seed is in two of the folders, so no samples stand side by side.")
    return notes


def _format_weights(run: Run) -> str:
    """Return the rewards of a run's total with their weights."""
    uses = run.config.get("rewards", [])
    parts = [name_of(use) if use["weight"] == 1 else f"{number(use['weight'])} × {name_of(use)}" for use in uses]
    form = run.trained.form
    return ", ".join(parts) + (f" ({form})" if form != "sum" else "") if parts else "no rewards"
