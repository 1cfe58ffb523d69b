"""The folder of an evaluation: what was asked, the samples, their scores.

evaluation.json   what was asked: the set, the model, the samples of a prompt, the rewards
manifest.jsonl    the samples, as `flowgrpo sample` writes them, with their rewards in the end
scores.jsonl      a line for each sample: file, prompt, index, sample, seed, categories, rewards, answers
summary.json      means and errors by category, of each reward
evaluation.html   the page
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from flowgrpo.data import tables
from flowgrpo.errors import InputError

ASKED, SCORES, SUMMARY, PAGE = "evaluation.json", "scores.jsonl", "summary.json", "evaluation.html"


@dataclass(frozen=True, kw_only=True)
class Scored:
    """A sample and its scores; `index` is that of its prompt in the set, `sample` counts those of one prompt."""

    file: str
    prompt: str
    index: int
    sample: int
    seed: int
    categories: list[str]
    rewards: dict[str, float | None] = field(default_factory=dict)
    # Of rewards that ask the prompt's questions: the categories and the grade of each.
    answers: dict[str, list[tuple[list[str], float]]] = field(default_factory=dict)

    def marks(self, reward: str) -> Iterator[tuple[str, float]]:
        """Yield categories, each with a mark: of each question, if the questions have categories, else the score."""
        value, answers = self.rewards.get(reward), self.answers.get(reward, ())
        if value is None:
            return
        if any(names for names, _ in answers):
            yield from ((name, grade) for names, grade in answers for name in names)
        else:
            yield from ((name, value) for name in self.categories)

    @property
    def document(self) -> dict[str, Any]:
        """Return the sample as a line of `SCORES`."""
        return asdict(self)


@dataclass(frozen=True)
class Results:
    """An evaluation that is done."""

    folder: Path
    asked: dict[str, Any]
    samples: list[Scored]

    @property
    def rewards(self) -> list[str]:
        """Names of the rewards; the first one is the score."""
        return list(self.asked["rewards"])


def is_evaluation(folder: Path) -> bool:
    """Return whether a folder holds an evaluation."""
    return (folder / ASKED).is_file()


def read_asked(folder: Path) -> dict[str, Any]:
    """Return what an evaluation was asked; raise InputError if the file is damaged."""
    asked = tables.document(folder / ASKED)
    if not isinstance(asked, dict) or not isinstance(asked.get("rewards"), dict) or "set" not in asked:
        raise InputError(f"{folder / ASKED}: it is not of an evaluation")
    return asked


def read_results(folder: Path) -> Results:
    """Return the evaluation in a folder; raise InputError if it is not done or damaged."""
    asked, lines = read_asked(folder), tables.log(folder / SCORES)
    if not (folder / SUMMARY).is_file():
        raise InputError(f"{folder}: its evaluation is not done; run the command that began it again")
    return Results(folder, asked, [read_line(line, place) for place, line in lines])


def read_line(line: dict[str, Any], place: str) -> Scored:
    """Return the sample of a line; raise InputError if it is malformed."""
    try:
        scored = Scored(**line)
        return Scored(
            **{
                **vars(scored),
                "rewards": {name: None if value is None else float(value) for name, value in scored.rewards.items()},
                "answers": {
                    name: [(list(names), float(grade)) for names, grade in each]
                    for name, each in scored.answers.items()
                },
            }
        )
    except (TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{place}: it is no line of an evaluation's scores ({error})") from error
