"""The rewards of a run over its iterations: curves with their spread, and a table of the evaluations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flowgrpo.commands.gallery.curve import PART, Band, curve
from flowgrpo.commands.gallery.numbers import Mean
from flowgrpo.commands.report.cost import Lines

MOST = 12  # rows of the table


@dataclass(frozen=True)
class Curve:
    """One reward's curve, as an SVG element."""

    name: str
    watched: bool
    svg: str


@dataclass(frozen=True)
class Evaluation:
    """One evaluation on the held-out prompts.

    Attributes:
        mean: of the total reward, with its standard error; None where no sample has one.
        parts: means of each reward, in the order of their names.
    """

    step: int
    mean: Mean | None
    parts: list[float | None]


def total_curve(lines: Lines) -> str | None:
    """Return the curve of the total reward: held-out with its standard error, and the training's with its deviation.

    None where neither was measured twice.
    """
    means = [(line["step"], Mean.of(line)) for line in _of(lines, "eval") if line.get("reward/mean") is not None]
    held_out = [(step, mean.value) for step, mean in means]
    train = points(lines, "train", "reward/mean")
    if max(len(held_out), len(train)) < 2:
        return None
    errors = [
        (step, mean.value - mean.error, mean.value + mean.error) for step, mean in means if mean.error is not None
    ]
    deviations = [
        (line["step"], line["reward/mean"] - line["reward/std"], line["reward/mean"] + line["reward/std"])
        for line in _of(lines, "train")
        if line.get("reward/mean") is not None and line.get("reward/std") is not None
    ]
    bands: dict[str, Band] = {"train": deviations, "held-out": errors}
    return curve(held_out, train, bands=bands)


def part_curves(lines: Lines, trained: Sequence[str], watched: Sequence[str]) -> list[Curve]:
    """Return a curve of each reward that was evaluated twice; none of a single reward."""
    names = [*trained, *watched]
    found = []
    for name in names if len(names) > 1 else []:
        held_out, train = (points(lines, phase, f"reward/{name}/mean") for phase in ("eval", "train"))
        if len(held_out) > 1:
            found.append(Curve(name, name in watched, curve(held_out, train, PART, label=f"{name} by iteration")))
    return found


def evaluations(lines: Lines, names: Sequence[str]) -> list[Evaluation]:
    """Return the evaluations, or `MOST` of them evenly apart, the first and the last among them."""
    every = [
        Evaluation(
            line["step"],
            Mean.of(line) if line.get("reward/mean") is not None else None,
            [line.get(f"reward/{name}/mean") for name in names],
        )
        for line in _of(lines, "eval")
    ]
    if len(every) <= MOST:
        return every
    return [every[round(i * (len(every) - 1) / (MOST - 1))] for i in range(MOST)]


def points(lines: Lines, phase: str, key: str) -> list[tuple[int, float]]:
    """Return step and value of each line of a phase that has one."""
    return [(line["step"], line[key]) for line in _of(lines, phase) if line.get(key) is not None]


def _of(lines: Lines, phase: str) -> Lines:
    return [line for line in lines if line["phase"] == phase]
