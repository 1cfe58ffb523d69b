"""Scoring of an evaluation's samples; each batch is on disk before the next, so that nothing is scored twice."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from flowgrpo.commands.evaluations.results import SCORES, Scored
from flowgrpo.commands.scores.score import File, list_files, score_files
from flowgrpo.data.evaluation.sets import QUESTIONS, question_categories
from flowgrpo.training.reports.progress import open_display
from flowgrpo.training.run.phases import phase
from rewards import Reward


def score_samples(
    folder: Path, samples: Sequence[Scored], rewards: Sequence[Reward], batch_size: int, *, by_questions: bool = False
) -> list[Scored]:
    """Return samples with a score of each reward; those that they have already are kept.

    New scores are appended to `SCORES`. `by_questions` keeps the categories of the questions that a reward asks. Raise
    RewardError if a reward fails.
    """
    files = {file.name: file for file in list_files(folder)}
    scored = {sample.file: sample for sample in samples}
    left = [sample for sample in samples if any(reward.name not in sample.rewards for reward in rewards)]
    with (folder / SCORES).open("a", encoding="utf-8") as log, open_display(), phase("scoring", len(left)) as scoring:
        for part in _whole_prompts(left, batch_size):
            for reward in rewards:
                asked = []
                for sample in (scored[sample.file] for sample in part if reward.name not in sample.rewards):
                    if reward.applies(files[sample.file].columns):
                        asked.append(sample)
                    else:
                        scored[sample.file] = replace(sample, rewards={**sample.rewards, reward.name: None})
                of_asked = [files[sample.file] for sample in asked]
                for sample in _score(asked, of_asked, reward, folder, by_questions=by_questions):
                    scored[sample.file] = sample
            log.writelines(json.dumps(scored[sample.file].document) + "\n" for sample in part)
            log.flush()
            scoring.advance(len(part))
    return list(scored.values())


def _whole_prompts(samples: Sequence[Scored], batch_size: int) -> Iterator[list[Scored]]:
    """Yield at least `batch_size` samples at a time, all of a prompt together, as group-wise rewards need them."""
    part: list[Scored] = []
    for _, of_prompt in groupby(samples, key=lambda sample: sample.index):
        part += of_prompt
        if len(part) >= batch_size:
            yield part
            part = []
    if part:
        yield part


def _score(
    samples: Sequence[Scored], files: Sequence[File], reward: Reward, folder: Path, *, by_questions: bool
) -> Iterator[Scored]:
    for values in score_files(folder, files, reward, len(samples)) if samples else ():
        graded = getattr(reward.function, "graded", None) or [None] * len(values)
        for (i, value), grades in zip(values.items(), graded, strict=True):
            answers = samples[i].answers
            if grades is not None:
                names = map(question_categories, files[i].columns[QUESTIONS]) if by_questions else [[]] * len(grades)
                answers = answers | {reward.name: list(zip(names, grades, strict=True))}
            yield replace(samples[i], rewards={**samples[i].rewards, reward.name: value}, answers=answers)
