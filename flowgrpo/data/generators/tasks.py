"""Procedural text tasks: Countdown, 4 x 4 Sudoku and integer arithmetic.

A row has the columns `prompt`; `task`; those of its reward in `rewards/texts/text.py`; `bare`, true, because
completions have no tags; and `completion`, a solution to pretrain on. Columns of other tasks are None.

    make 41 from 3 7 20:                        3*7+20
    sudoku 1.3./34.2/..4./4..1:                 1234/3412/2143/4321
    compute 12*7-85:                            -1

No problem of `eval` is a rewording of one of `train`. A Countdown is identified by its numbers and target, an arithmetic
problem by its terms in any order. A Sudoku is identified by its solution: only 288 exist, and a model would memorise them.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import combinations, permutations
from math import prod
from typing import Any

import numpy as np

from samplers import noise

SPLITS = ("train", "eval")
COLUMNS = ("task", "bare", "completion", "numbers", "target", "puzzle", "solution", "answer")
ALPHABET = " ()*+-./0123456789:acdefkmoprstu"  # every character of a prompt or a completion
LONGEST_PROMPT = 27
LONGEST_COMPLETION = 19

LARGEST_NUMBER = 20  # of Countdown; d1 (2504.12216) has 100, too wide for the embedded model
LARGEST_TARGET = 100
EMPTY_CELLS = 8  # of a Sudoku's 16, as in d1's test file
SUMS = ("a+b", "a-b", "a*b", "a*b+c", "a*b-c", "a+b-c", "a-b-c")
LARGEST_TERM, LARGEST_FACTOR = 99, 12

Row = dict[str, Any]


@dataclass(frozen=True)
class Problem:
    """A problem of one task; all problems of a `family` belong to one split."""

    family: Any
    prompt: str
    completion: str
    columns: Row


def is_held_out(task: str, family: Any) -> bool:
    """Return whether a family belongs to `eval`: its hash falls into 40 of 256 buckets."""
    return hashlib.blake2b(repr((task, family)).encode(), digest_size=1).digest()[0] < 40


def draw(task: str, split: str, rng: np.random.Generator) -> Row:
    """Draw one row of a task (`countdown`, `sudoku`, `arithmetic`) and a split (`train`, `eval`)."""
    while True:
        problem = TASKS[task](rng)
        if is_held_out(task, problem.family) == (split == "eval"):
            columns = {"task": task, "bare": True, "completion": problem.completion, **problem.columns}
            return {"prompt": problem.prompt, **dict.fromkeys(COLUMNS), **columns}


def problems(task: str, split: str, count: int, seed: int = 0) -> list[Row]:
    """Return the first `count` distinct problems of a task and split; a larger count only appends.

    Problem i is redrawn, with a generator of its own (seed, task, split, i), until it is new. Each caller gets a copy.
    """
    return [
        {key: [*value] if isinstance(value, list) else value for key, value in row.items()}
        for row in _draw_rows(task, split, count, seed)
    ]


@cache
def _draw_rows(task: str, split: str, count: int, seed: int) -> list[Row]:
    rows: dict[str, Row] = {}
    for i in range(count):
        rng = noise.generator(seed, "tasks", task, split, i)
        row = draw(task, split, rng)
        while row["prompt"] in rows:
            row = draw(task, split, rng)
        rows[row["prompt"]] = row
    return list(rows.values())


def mix_tasks(tasks: Iterable[str], split: str, count: int, seed: int = 0) -> list[Row]:
    """Return `count` problems of each task, alternating."""
    parts = [problems(task, split, count, seed) for task in tasks]
    return [row for turn in zip(*parts, strict=True) for row in turn]


@dataclass(frozen=True)
class _Term:
    """An expression: text, value, and precedence of its last operator (3: a number)."""

    text: str
    value: int
    binding: int = 3


_OPERATORS = {  # function and precedence
    "+": (operator.add, 1), "-": (operator.sub, 1), "*": (operator.mul, 2), "/": (operator.floordiv, 2),
}  # fmt: skip


def countdown(rng: np.random.Generator) -> Problem:
    """Draw three numbers from 1 to 20 and a target from 1 to 100, reachable through positive integers only."""
    while True:
        numbers = [int(n) for n in rng.integers(1, LARGEST_NUMBER + 1, 3)]
        first, second, third = (_Term(str(n), n) for n in numbers)
        inner, outer = ("+-*/"[i] for i in rng.integers(4, size=2))
        pair = _combine(first, inner, second)
        if pair is None:
            continue
        whole = _combine(pair, outer, third) if rng.random() < 0.5 else _combine(third, outer, pair)
        if whole is not None and whole.value <= LARGEST_TARGET:
            numbers.sort()
            prompt = f"make {whole.value} from {' '.join(map(str, numbers))}:"
            columns = {"numbers": numbers, "target": whole.value}
            return Problem((tuple(numbers), whole.value), prompt, whole.text, columns)


def _combine(left: _Term, sign: str, right: _Term) -> _Term | None:
    """Return left sign right with minimal parentheses; None unless the value is a positive integer."""
    if sign == "/" and left.value % right.value:
        return None
    operate, binding = _OPERATORS[sign]
    value = operate(left.value, right.value)
    if value < 1:
        return None
    before = f"({left.text})" if left.binding < binding else left.text
    tight = right.binding > binding or (right.binding == binding and sign in "+*")
    return _Term(before + sign + (right.text if tight else f"({right.text})"), value, binding)


@cache
def grids() -> np.ndarray:
    """Return all 288 solved grids, int8 (288, 16), row by row."""
    return np.array([[int(c) for row in rows for c in row] for rows in _completions(())], dtype=np.int8)


@cache
def _agreements() -> np.ndarray:
    """Return the cells in which each pair of grids agrees: int32 (288, 288), bit i for cell i."""
    agree = grids()[:, None] == grids()
    return (agree * (1 << np.arange(16, dtype=np.int32))).sum(2, dtype=np.int32)


def _completions(rows: tuple[tuple[str, ...], ...]) -> Iterator[tuple[tuple[str, ...], ...]]:
    if len(rows) == 4:
        yield rows
        return
    for row in permutations("1234"):
        columns_differ = all(a != b for above in rows for a, b in zip(above, row, strict=True))
        # If the left box of two rows holds all four digits, so does the right one.
        box_is_full = len(rows) % 2 == 0 or len({*rows[-1][:2], *row[:2]}) == 4
        if columns_differ and box_is_full:
            yield from _completions((*rows, row))


def sudoku(rng: np.random.Generator) -> Problem:
    """Draw a grid with 8 empty cells and a unique solution; cells are cleared in random order while it stays unique."""
    while True:
        which = rng.integers(len(grids()))
        solution, agreements = grids()[which], _agreements()[which]
        given = 2**16 - 1  # bits of cells
        for cell in rng.permutation(16).tolist():
            fewer = given & ~(1 << cell)
            if np.count_nonzero(agreements & fewer == fewer) > 1:  # several grids fit the remaining cells
                continue
            given = fewer
            if given.bit_count() == 16 - EMPTY_CELLS:
                asked, solved = _digits(solution * (given >> np.arange(16) & 1)), _digits(solution)
                prompt = f"sudoku {_format_rows(asked).replace('0', '.')}:"
                return Problem(solved, prompt, _format_rows(solved), {"puzzle": asked, "solution": solved})


def _digits(grid: np.ndarray) -> str:
    return "".join(map(str, grid))


def _format_rows(digits: str) -> str:
    return "/".join(digits[i : i + 4] for i in range(0, 16, 4))


def arithmetic(rng: np.random.Generator) -> Problem:
    """Draw a sum of two or three terms from 1 to 99, one possibly a product of factors from 2 to 12."""
    pattern = SUMS[rng.integers(len(SUMS))]
    text = ""
    terms: list[tuple[int, tuple[int, ...]]] = []
    for term in pattern.replace("-", "+-").split("+"):
        product = "*" in term
        low, high = (2, LARGEST_FACTOR) if product else (1, LARGEST_TERM)
        factors = [int(n) for n in rng.integers(low, high + 1, 2 if product else 1)]
        sign = -1 if term.startswith("-") else 1
        text += ("-" if sign < 0 else "+" if terms else "") + "*".join(map(str, factors))
        terms.append((sign, tuple(sorted(factors))))
    answer = sum(sign * prod(factors) for sign, factors in terms)
    return Problem(tuple(sorted(terms)), f"compute {text}:", str(answer), {"answer": answer})


TASKS: dict[str, Callable[[np.random.Generator], Problem]]
TASKS = {"countdown": countdown, "sudoku": sudoku, "arithmetic": arithmetic}

_COUNTS = {"train": 1024, "eval": 512}
_SETS = {"+".join(some): some for size in (1, 2) for some in combinations(TASKS, size)} | {"tasks": tuple(TASKS)}

BUILT_IN: dict[str, Callable[[], list[Row]]] = {
    f"{name}:{s}": partial(mix_tasks, some, s, _COUNTS[s]) for name, some in _SETS.items() for s in SPLITS
}
