"""Corpora of problems that a user has a copy of: GSM8K (2110.14168) and MATH (2103.03874), in their original columns.

`gsm8k:train` and `gsm8k:test`, `math:train` and `math:test` are looked for in a folder of that name, in the layouts that the
corpora are given out in; `gsm8k:some/file.jsonl` is that file, .jsonl or .parquet.

A row has the columns `prompt`, the question; `answer`, the final answer alone, for the rewards; `completion`, the worked
solution up to its final answer, for hints (IGPO), None without one; and further columns of the file as they are.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from flowgrpo.data import tables
from flowgrpo.data.tables import Row
from flowgrpo.errors import InputError
from rewards import latex
from rewards.base import nearest

SPLITS = ("train", "test")
_CALCULATION = re.compile(r"<<[^<>]*>>")  # GSM8K's notes for a calculator, as in 6 * 7 = <<6*7=42>>42


def grade_school(row: Row, place: str) -> Row:
    """A row of GSM8K (`question`, and `answer` with the number after ####) as a prompt row.

    Raises:
        InputError: a column is missing, or the answer has no ####.
    """
    question, worked = tables.text(row, "question", place), tables.text(row, "answer", place)
    solution, mark, answer = worked.rpartition("####")
    if not mark:
        raise InputError(f"{place}: answer is {worked[-40:]!r}, GSM8K's end with #### and the number")
    completion = _CALCULATION.sub("", solution).strip() or None
    return _joined(row, "question", question=question, answer=answer, completion=completion)


def competition(row: Row, place: str) -> Row:
    r"""A row of MATH (`problem`, and `solution` with the answer in \boxed; MATH-500 has it in `answer`) as a prompt row.

    Raises:
        InputError: a column is missing, or nothing has the answer.
    """
    problem = tables.text(row, "problem", place)
    if row.get("answer") is not None:
        solution, answer = row.get("solution"), tables.text(row, "answer", place)
    else:
        solution = tables.text(row, "solution", place)
        answer = latex.last_boxed(solution)
    if not answer:
        raise InputError(f"{place}: the solution has no \\boxed answer, and there is no column answer")
    return _joined(
        row,
        "problem",
        question=problem,
        answer=answer,
        completion=solution and re.split(r"\\(?:boxed|fbox)", solution)[0].strip(),
    )


def _joined(row: Row, asked: str, *, question: str, answer: str, completion: str | None) -> Row:
    further = {name: cell for name, cell in row.items() if name != asked}
    return {"prompt": question.strip(), **further, "answer": answer.strip(), "completion": completion or None}


@dataclass(frozen=True)
class Corpus:
    """A corpus: where it is to be had, where its files lie in a copy (the first pattern that is met), how a row is read."""

    home: str
    patterns: tuple[str, ...]
    read: Callable[[Row, str], Row]


_ANYWHERE = ("{split}.jsonl", "{split}.parquet", "{split}-*.parquet")
CORPORA = {
    "gsm8k": Corpus(
        "openai/gsm8k",
        (*_ANYWHERE, "main/{split}-*.parquet", "grade_school_math/data/{split}.jsonl"),
        grade_school,
    ),
    "math": Corpus(
        "EleutherAI/hendrycks_math",
        (*_ANYWHERE, "data/{split}-*.parquet", "*/{split}-*.parquet"),  # the last is a folder for each subject
        competition,
    ),
}
NAMES = tuple(f"{name}:{split}" for name in CORPORA for split in SPLITS)


def is_corpus(source: str) -> bool:
    """Whether a source of prompts is of a corpus: its name and a colon."""
    return source.partition(":")[0] in CORPORA and ":" in source


def load(source: str, folder: str, key: str) -> list[Row]:
    """The prompt rows of a corpus.

    Args:
        source: its name, a colon, and a split or a file.
        folder: where a split is looked for, in a folder with the name of the corpus.
        key: the place named in errors.

    Raises:
        InputError: there is no such split or file, or a row of it is wrong.
    """
    name, _, part = source.partition(":")
    files = [Path(part)] if Path(part).suffix in tables.SUFFIXES else _files(source, Path(folder) / name, key)
    for file in files:
        if not file.is_file():
            raise InputError(f"{key}: there is no file {file}")
    return [CORPORA[name].read(row, place) for file in files for place, row in tables.rows(file, key)]


def _files(source: str, folder: Path, key: str) -> list[Path]:
    name, _, split = source.partition(":")
    if split not in SPLITS:
        raise InputError(
            f"{key}: {source} is neither a split of {name} nor a .jsonl or .parquet file, {nearest(source, NAMES)}"
        )
    corpus = CORPORA[name]
    for pattern in corpus.patterns:
        files = sorted(folder.glob(pattern.format(split=split)))
        if files:
            return files
    raise InputError(
        f"{key}: {source} looks in {folder} for {split}.jsonl or a copy of {corpus.home} (its parquet files), and there is "
        f"none; put it there, set prompts.folder, or name the file, {name}:path/to/{split}.jsonl"
    )
