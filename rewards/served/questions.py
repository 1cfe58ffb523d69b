"""The `questions` reward: a vision-language model behind an endpoint answers the questions of each sample's prompt.

Questions about a generated picture whose answers are known, as in TIFA (arXiv 2303.11897); questions that depend on others,
as in Davidsonian scene graphs (arXiv 2310.18235) and DPG-Bench; probabilities in place of answers, and their geometric
mean, as in Soft-TIFA (GenEval 2, arXiv 2512.16853). The sets of `flowgrpo evaluate` that ask questions are scored by it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from statistics import geometric_mean, mean
from typing import Any

import torch

from rewards.base import RewardError, nearest
from rewards.served.chat import Chat
from rewards.served.grading import fill_in, pictures, text

YES = {"yes": 1.0, "no": 0.0}
NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
MEANS = ("arithmetic", "geometric")
Asked = Mapping[str, Any]  # an entry of the column `questions`


class Questions:
    """Mean over the questions of a sample's prompt of 1 for the right answer and 0 for a wrong one.

    The column `questions` is a list of maps: `question`; `answer`, yes (the default), no, or a number from one to ten;
    `needs`, the places of other questions: if one of them is answered wrongly, this one counts as 0. Further keys are for
    the template. None where an answer cannot be read, or a row has no questions. Videos are shown as single frames.

    Args:
        endpoint: URL of an OpenAI-compatible endpoint, mostly ending in /v1; several, separated by commas, are replicas.
        model: its name there; optional if there is only one.
        template: what is asked; {question}, {prompt} and other keys of the question in braces are replaced.
        soft: count the probability of the right answer, not 1 or 0. An answer is wrong for `needs` below one half.
        mean: arithmetic or geometric.
        frames: maximum number of frames of a video.
        options: others of `rewards.served.chat.Chat`: method, concurrency, timeout, retries, tries, token_env, system,
            closing, max_tokens, extra.

    Attributes:
        graded: the grade of each question of the samples of the last call, before `needs`; None for a sample without.
    """

    remote = True  # waits for a server and retries by itself

    def __init__(
        self,
        endpoint: str,
        model: str | None = None,
        *,
        template: str = "{question}",
        soft: bool = False,
        mean: str = "arithmetic",
        frames: int = 8,
        **options: Any,
    ):
        if mean not in MEANS:
            raise RewardError(f"mean: there is no {mean!r}, {nearest(str(mean), MEANS)}")
        self.chat = Chat(YES, endpoint, model=model, **options)
        self.template, self.soft, self.mean, self.frames = template, soft, mean, frames
        self.graded: list[list[float] | None] = []

    def __call__(
        self,
        samples: torch.Tensor,
        prompts: Sequence[str],
        questions: Sequence[Sequence[Asked] | None] | None = None,
    ) -> list[float | None]:
        """Return scores of B samples, images (B, 3, H, W) or videos (B, F, 3, H, W) in [0, 1]."""
        if questions is None:
            raise RewardError("the questions reward needs prompts with the column questions, a list of maps for each")
        asked, answers = [], []
        for sample, prompt, own in zip(samples, prompts, questions, strict=True):
            entries = own or ()
            shown = pictures(sample, self.frames) if entries else []
            for question in entries:
                _check(question, len(entries), prompt)
                asked.append([*shown, text(fill_in(self.template, {**question, "prompt": prompt}))])
                answers.append(possible_answers(str(question.get("answer", "yes"))))
        values = iter(self.chat.ask(asked, answers))
        self.graded = [self._grade(list(islice(values, len(own or ())))) for own in questions]
        return [combine(own, one, self.mean) for own, one in zip(questions, self.graded, strict=True)]

    def _grade(self, values: Sequence[float | None]) -> list[float] | None:
        known = [value for value in values if value is not None]
        if not known or len(known) < len(values):
            return None
        return known if self.soft else [float(value >= 0.5) for value in known]


def possible_answers(right: str) -> dict[str, float]:
    """Return the possible answers of a question and their values, 1 for the right one: yes and no, or numbers.

    Digits are told by the first: 1 is one, but where ten is right it is ten, as GenEval 2 reads it. Raise RewardError for
    another right answer.
    """
    right = right.strip().lower()
    if right in YES:
        return {answer: float(answer == right) for answer in YES}
    if right not in NUMBERS:
        raise RewardError(f"answer: {right!r} is neither yes nor no nor a number from one to ten")
    digits = dict(zip("123456789", NUMBERS, strict=False)) | ({"1": right} if right == "ten" else {})
    return {word: float(word == right) for word in NUMBERS} | {d: float(word == right) for d, word in digits.items()}


def combine(questions: Sequence[Asked] | None, graded: Sequence[float] | None, how: str) -> float | None:
    """Return the mean of the grades after those are 0 whose `needs` were answered wrongly; None without grades."""
    if questions is None or graded is None:
        return None
    grades = [
        0.0 if any(graded[place] < 0.5 for place in question.get("needs") or ()) else grade
        for question, grade in zip(questions, graded, strict=True)
    ]
    if how == "arithmetic":
        return mean(grades)
    return geometric_mean(grades) if min(grades) > 0 else 0.0


def _check(question: Any, count: int, prompt: str) -> None:
    """Raise RewardError if one of the `count` entries of a prompt is no question, or needs a place that is not there."""
    if not isinstance(question, Mapping) or not isinstance(question.get("question"), str):
        raise RewardError(f"questions of the prompt {prompt!r}: {question!r} is no map with the key question")
    needs = question.get("needs")
    if needs is None:
        return
    if not isinstance(needs, list) or not all(type(place) is int and 0 <= place < count for place in needs):
        raise RewardError(
            f"questions of the prompt {prompt!r}: needs is {needs!r}, not a list of places, 0 to {count - 1}"
        )
