"""The page of an evaluation, or of several compared: numbers by category, and the samples at both ends of each."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowgrpo.commands.compare.differences import in_words
from flowgrpo.commands.compare.runs import COLOURS
from flowgrpo.commands.evaluations.comparing import Compared, compare, letter, restrict, sentences
from flowgrpo.commands.evaluations.results import PAGE, Results, Scored
from flowgrpo.commands.evaluations.statistics import TOTAL, parent
from flowgrpo.commands.page_parts import pages
from flowgrpo.commands.page_parts.cards import LARGEST_MEDIA, Shown, show
from flowgrpo.commands.page_parts.media import LONGEST
from flowgrpo.commands.page_parts.numbers import number
from flowgrpo.commands.page_parts.totals import Member, Totals
from flowgrpo.data.evaluation.sets import QUESTIONS
from flowgrpo.training.run.run_files import read_manifest
from rewards import BUILT_IN

MOST = 4  # samples of each end of a category
LEAST = 0.25  # share of a reward's range
COMPARISON = "compare.html"
Lines = Mapping[str, dict[str, Any]]  # of a manifest, by file


@dataclass(frozen=True)
class Picture:
    """A sample with its mark in a category, and the questions that were asked about it with their grades."""

    shown: Shown
    mark: float
    questions: list[tuple[str, float]]


@dataclass(frozen=True)
class Figure:
    """The samples of a prompt, one of each evaluation."""

    prompt: str
    seed: int
    pictures: list[Picture]


@dataclass(frozen=True)
class End:
    """One end of a category: its title and the most extreme prompts."""

    title: str
    figures: list[Figure]


@dataclass(frozen=True)
class Axis:
    """The scale on which means are drawn; its ends, from low to high."""

    low: float
    high: float

    def place(self, value: float) -> float:
        """Return where a value lies, in percent."""
        return round(min(100.0, max(0.0, 100 * (value - self.low) / (self.high - self.low))), 2)

    @property
    def ticks(self) -> list[str]:
        """Both ends and the middle, in words."""
        return [f"{tick:.3g}".replace("-", "−") for tick in (self.low, (self.low + self.high) / 2, self.high)]


def write_page(results: Sequence[Results]) -> Path:
    """Write the page of one evaluation, or of several into the first one's folder, and return its path.

    Raise InputError if the evaluations have no prompt or no reward in common, or a sample is damaged.
    """
    out = results[0].folder / (PAGE if len(results) == 1 else COMPARISON)
    return pages.write_page(out, page(results))


def page(results: Sequence[Results]) -> str:
    """Return the HTML of one or several evaluations of a set."""
    common = restrict(results)
    compared = compare(common)
    score = compared[0]
    most = MOST if _media_bytes(common) <= LARGEST_MEDIA else 1
    names = [row.name for row in score.rows]
    tops = [name for name in names if parent(name, names) is None]
    lines = [{line["file"]: line for line in read_manifest(each.folder)} for each in common]
    return pages.template("evaluation.html.jinja").render(
        results=[{"letter": letter(i), "kind": f"c{i % COLOURS}", "result": one} for i, one in enumerate(results)],
        asked=results[0].asked,
        compared=compared,
        axes=[_axis(numbers, results[0]) for numbers in compared],
        sections=[(name, _ends(common, lines, score.reward, name, most=most)) for name in tops[:-1] or tops],
        parents={name: parent(name, names) for name in names},
        sentences=sentences(common, results, compared),
        facts=_facts(results),
        total=TOTAL,
        longest=LONGEST,
        number=number,
    )


def _facts(results: Sequence[Results]) -> list[tuple[str, str]]:
    """Return labelled facts of what was asked."""
    asked = results[0].asked
    calls = {each.asked["name"]: _call(each.asked["model"]["call"]) for each in results}
    of = f" of {asked['listed']}" if asked["prompts"] < asked["listed"] else ""
    facts = [
        ("prompts", f"{asked['prompts']}{of}" + f", {asked['samples']} samples of each" * (asked["samples"] > 1)),
        ("from", asked["paper"]),
        ("licence of the prompts", asked["licence"]),
        ("score", results[0].rewards[0]),
        ("total", "mean of the categories" if asked["total"] == "categories" else "mean of the prompts"),
        *((f"call of {name}" if len(results) > 1 else "call", call) for name, call in calls.items()),
    ]
    return [(label, text) for label, text in facts if text]


def _call(arguments: Mapping[str, Any]) -> str:
    given = {name: value for name, value in arguments.items() if value not in (None, False)}
    return ", ".join(f"{name} {value}" for name, value in in_words(given).items())


def _axis(numbers: Compared, results: Results) -> Axis:
    """Return the bounds of a reward, or of what was measured if there are none or it takes less than `LEAST` of them."""
    use = results.asked["rewards"][numbers.reward]["use"]
    bounds = BUILT_IN[use].bounds if use in BUILT_IN else None
    known = [each for row in numbers.rows for each in row.statistics if each]
    low = min((each.mean - (each.error or 0) for each in known), default=0.0)
    high = max((each.mean + (each.error or 0) for each in known), default=1.0)
    if bounds is not None and high - low >= LEAST * (bounds[1] - bounds[0]):
        return Axis(*bounds)
    step = 10 ** math.floor(math.log10(high - low)) if high > low else 1.0
    return Axis(math.floor(low / step) * step, (math.floor(high / step) + 1) * step)


def _media_bytes(results: Sequence[Results]) -> int:
    """Return the bytes of a page's samples, at most, if each end of each category has `MOST`."""
    files = [each.folder / one.file for each in results for one in each.samples]
    categories = {name for one in results[0].samples for name in one.categories}
    largest = sorted((file.stat().st_size for file in files), reverse=True)
    return sum(largest[: 2 * MOST * len(results) * (1 + len(categories))])


def _ends(results: Sequence[Results], lines: Sequence[Lines], reward: str, category: str, *, most: int) -> list[End]:
    """Return the worst and the best prompts of a category, or those that lost and gained most; of each its first sample."""
    marked = [_marks(each.samples, reward, category) for each in results]
    shared = [index for index in marked[0] if all(index in each for each in marked)]
    if len(results) == 1:
        ranked = sorted(shared, key=lambda index: marked[0][index][1])
        worst, best = ranked[: min(most, len(ranked) // 2)], ranked[::-1][: min(most, (len(ranked) + 1) // 2)]
        titles = {"worst": worst, "best": best}
    else:
        gains = {index: marked[-1][index][1] - marked[0][index][1] for index in shared}
        ranked = sorted(shared, key=gains.__getitem__)
        lost = [index for index in ranked[:most] if gains[index] < 0]
        titles = {"lost most": lost, "gained most": [index for index in ranked[::-1][:most] if gains[index] > 0]}
    return [
        End(title, [_figure(results, lines, [each[index] for each in marked], reward) for index in chosen])
        for title, chosen in titles.items()
        if chosen
    ]


def _marks(samples: Sequence[Scored], reward: str, category: str) -> dict[int, tuple[Scored, float]]:
    """Return, by prompt, the first sample with a mark in a category (of the total its score), and the mean of its marks."""
    found: dict[int, tuple[Scored, float]] = {}
    for one in sorted(samples, key=lambda one: -one.sample):
        value = one.rewards.get(reward)
        marks = [mark for name, mark in one.marks(reward) if name == category]
        if category == TOTAL and value is not None:
            marks = [value]
        if marks:
            found[one.index] = one, statistics.fmean(marks)
    return found


def _figure(
    results: Sequence[Results], lines: Sequence[Lines], marked: Sequence[tuple[Scored, float]], reward: str
) -> Figure:
    first = marked[0][0]
    every = zip(results, lines, marked, strict=True)
    return Figure(first.prompt, first.seed, [_picture(each, own, one, reward) for each, own, one in every])


def _picture(results: Results, lines: Lines, marked: tuple[Scored, float], reward: str) -> Picture:
    one, mark = marked
    trained = Totals([Member(reward, 1.0, 0.0, None)], "sum", 0.0)
    shown = show(results.folder, {"file": one.file, "step": 0, "rewards": one.rewards}, trained, (0.0, 0.0))
    asked = [str(question["question"]) for question in lines[one.file].get(QUESTIONS) or ()]
    grades = [grade for _, grade in one.answers.get(reward, ())]
    return Picture(shown, mark, list(zip(asked, grades, strict=False)))
