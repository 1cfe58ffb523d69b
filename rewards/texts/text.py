"""Verifiable rewards of texts: Countdown, 4 x 4 Sudoku, integer arithmetic, GSM8K, MATH, and their format.

A text is the model's output after the prompt. Its answer stands between the last <answer> and </answer>; where the column
`bare` is true the whole text is the answer, as the built-in prompts of small models ask. GSM8K and MATH accept more places,
see `final_answer`. A row in which a required column is None scores None, so one run may mix tasks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from rewards.texts import latex
from rewards.texts.expression import NotArithmetic, value

_TAG = re.compile("<(/?)answer>", re.IGNORECASE)
_INTEGER = re.compile(r"[+-]?[0-9]+")
_TAGS = ("<reasoning>", "</reasoning>", "<answer>", "</answer>")
_TURN = re.compile(r"</reasoning>\s*<answer>")

Texts = Sequence[str]
Scores = list[float | None]
Bare = Sequence[bool | None] | None


def answer_of(text: str, bare: bool | None = False) -> str | None:
    """Return the stripped content of the last pair of answer tags, or the whole text if `bare`; None if there is none."""
    if bare:
        return text.strip() or None
    tagged = last_tagged(text)
    return None if tagged is None else tagged.strip()


def last_tagged(text: str, any_case: bool = False) -> str | None:
    """Return the content of the last <answer>...</answer>, from its first opening tag, in one pass; None if absent."""
    start, content = None, None
    for tag in _TAG.finditer(text):
        if not any_case and tag[0] not in _TAGS:
            continue
        if tag[1]:
            content, start = (content if start is None else text[start : tag.start()]), None
        elif start is None:
            start = tag.end()
    return content


def _is_loose(text: str) -> bool:
    """Return whether a text begins with reasoning and then an answer, each in its tags, with white space around them."""
    text = text.lstrip()
    turn = _TURN.search(text, len("<reasoning>"))
    return text.startswith("<reasoning>") and turn is not None and "</answer>" in text[turn.end() :]


def _is_strict(text: str) -> bool:
    """Return whether a text is only reasoning and then an answer, with one line break on either side of each tag."""
    start, turn, end = "<reasoning>\n", "\n</reasoning>\n<answer>\n", "\n</answer>"
    text = text.removesuffix("\n")
    if not text.startswith(start) or not text.endswith(end):
        return False
    return turn in text[len(start) : len(text) - len(end)]


def _score(rule: Callable[..., float], texts: Texts, bare: Bare, *columns: Sequence) -> Scores:
    """Return `rule(answer, *cells)` for each text; None where a cell is None, 0 where there is no answer."""
    scores: Scores = []
    for text, whole, *cells in zip(texts, bare or [False] * len(texts), *columns, strict=True):
        answer = answer_of(text, whole)
        scores.append(None if None in cells else 0.0 if answer is None else rule(answer, *cells))
    return scores


def countdown(texts: Texts, prompts: Texts, *, numbers: Sequence, target: Sequence, bare: Bare = None) -> Scores:
    """Return 1 for an expression of exactly the given numbers that makes the target, 0.1 for any other answer, 0 for none.

    The rule of d1 (2504.12216, its released code): the integers in the answer are, as a multiset, `numbers` (lists of
    integers or texts such as "3,25,7"); it has only digits, + - * / ( ) . and white space; its value lies within 1e-5 of
    the integer `target`. As in that code, ** and // are allowed.
    """
    return _score(_countdown, texts, bare, numbers, target)


def _countdown(answer: str, numbers: Any, target: Any) -> float:
    try:
        given = sorted(map(int, re.findall(r"\d+", numbers) if isinstance(numbers, str) else numbers))
        wanted = int(target)
    except (TypeError, ValueError, OverflowError):  # int() refuses more than 4300 digits
        columns = f"{str(numbers)[:80]!r} and {str(target)[:80]!r}"
        raise ValueError(f"countdown takes integers as numbers and target, not {columns}") from None
    used = re.findall(r"[0-9]+", answer)
    if any(len(n) > 18 for n in used) or sorted(map(int, used)) != given:
        return 0.1
    try:
        return 1.0 if abs(value(answer) - wanted) < 1e-5 else 0.1
    except (NotArithmetic, OverflowError):
        return 0.1


def sudoku(texts: Texts, prompts: Texts, *, puzzle: Sequence, solution: Sequence, bare: Bare = None) -> Scores:
    """Return the share of empty cells that are filled correctly, in [0, 1]; 0 without an answer (d1, arXiv 2504.12216).

    `puzzle` and `solution` are texts of 16 digits, 0 where a cell is empty. The first 16 digits of the answer are read row
    by row, whatever stands between them; missing ones are wrong.
    """
    return _score(_sudoku, texts, bare, puzzle, solution)


def _sudoku(answer: str, puzzle: Any, solution: Any) -> float:
    puzzle, solution = str(puzzle).zfill(16), str(solution)
    if len(puzzle) != 16 or len(solution) != 16:
        raise ValueError(f"sudoku takes a puzzle and a solution of 16 digits, not {puzzle!r} and {solution!r}")
    filled = "".join(c for c in answer if c.isdigit()).ljust(16, "0")
    empty = [i for i in range(16) if puzzle[i] == "0"]
    return sum(filled[i] == solution[i] for i in empty) / len(empty) if empty else 0.0


def arithmetic(texts: Texts, prompts: Texts, answer: Sequence, bare: Bare = None) -> Scores:
    """Return 1 where the answer is the integer `answer` (a number or a text) and nothing else, else 0."""
    return _score(_arithmetic, texts, bare, answer)


def _arithmetic(text: str, right: Any) -> float:
    expected = _integer(right.strip() if isinstance(right, str) else str(int(right)))
    if expected is None:
        raise ValueError(f"arithmetic takes an integer as the answer, not {right[:80]!r}")
    return float(_integer(text) == expected)


def _integer(text: str) -> str | None:
    """Normalise an integer of any length, which `int` may refuse to parse; None if the text is none."""
    if not _INTEGER.fullmatch(text):
        return None
    digits = text.lstrip("+-").lstrip("0")
    return "-" + digits if digits and text[0] == "-" else digits


def solved(texts: Texts, prompts: Texts, **columns: Sequence) -> Scores:
    """Return 1 where `countdown`, `sudoku` or `arithmetic` gives 1, else 0; the columns of a row tell its task.

    A Sudoku counts only if the whole grid is right, which is stricter than the share of cells that d1 reports.
    """
    scores: Scores = [None] * len(texts)
    for reward, names in _TASKS:
        if all(name in columns for name in names):
            given = reward(texts, prompts, **{name: columns[name] for name in names}, bare=columns.get("bare"))
            scores = [old if new is None else float(new == 1) for old, new in zip(scores, given, strict=True)]
    return scores


_TASKS = ((countdown, ("numbers", "target")), (sudoku, ("puzzle", "solution")), (arithmetic, ("answer",)))


def tags(texts: Texts, prompts: Texts) -> list[float]:
    """Return 0.125 for each of the tags <reasoning> </reasoning> <answer> </answer> that occurs exactly once, at most 0.5.

    Each character after </answer> except surrounding white space costs 0.001, down to 0 (after d1, where line breaks are
    required that are optional here).
    """
    return [_tags(text) for text in texts]


def _tags(text: str) -> float:
    after = text.rpartition("</answer>")[2].strip() if "</answer>" in text else ""
    return max(0.0, sum(0.125 for tag in _TAGS if text.count(tag) == 1) - 0.001 * len(after))


def final_answer(text: str) -> str | None:
    r"""Return the final answer of a worked text; None if nothing marks one.

    It is read from the text after the last <answer>, up to </answer> or the end; if that is empty, from the whole text. The
    answer is the content of the last non-empty \boxed there, else the line after the last ####, else all of it if it stood
    in tags or is a number.
    """
    _, tag, after = text.rpartition("<answer>")
    tagged = after.partition("</answer>")[0].strip() if tag else ""
    read = tagged or text
    boxed = latex.last_boxed(read)
    if boxed:
        return boxed
    _, mark, after = read.rpartition("####")
    if mark:
        return after.strip().partition("\n")[0].rstrip()
    return read if tagged or latex.number(read) is not None else None


def gsm8k(texts: Texts, prompts: Texts, answer: Sequence) -> Scores:
    """Return format and correctness of a grade-school answer, the sum that d1 (2504.12216) trains with, in [0, 4].

    `tags` gives at most 0.5. A text that begins with reasoning and then an answer, each in its tags, earns 0.5. It earns 0.5
    more if it has nothing else, and one line break on either side of each tag. An integer answer earns 0.5, the right one 2
    (as in `gsm8k_accuracy`). Reasoning may have many lines, as in d1's later pattern; the strict patterns of d1's first
    release, of SPG and of IGPO do not match such reasoning.
    """
    return _judge(_gsm8k, texts, answer)


def _judge(rule: Callable[[str, Any], float], texts: Texts, answers: Sequence) -> Scores:
    rows = zip(texts, answers, strict=True)
    return [None if right is None else float(rule(text, right)) for text, right in rows]


def _gsm8k(text: str, right: Any) -> float:
    is_integer = bool(_INTEGER.fullmatch(final_answer(text) or ""))
    form = _tags(text) + 0.5 * _is_loose(text) + 0.5 * _is_strict(text)
    return form + 0.5 * is_integer + 2.0 * _same_number(text, right)


def gsm8k_accuracy(texts: Texts, prompts: Texts, answer: Sequence) -> Scores:
    r"""Return 1 where the final answer of a text is the right number, else 0.

    `final_answer`, in tags, in a box or after ####, is right if it is the number in any spelling ("$1,000.00", "25%"), or if
    its last number is right ("42 eggs", "6 * 7 = 42"). The last number of a text without any mark does not count. The
    released functions differ:

     - d1's reward requires that the text after the last <answer>, closed or not, or the whole text, equals the number;
     - d1's evaluation reads the number in the first \boxed, else the last one in closed tags;
     - IGPO reads the first \boxed;
     - ESPO reads "The answer is 42", #### 42, or the last number of the text;
     - JustGRPO reads the last \boxed, "the answer is", or the last number.

    The column `answer` has answers alone or in GSM8K's format, after "####".
    """
    return _judge(_same_number, texts, answer)


def _same_number(text: str, right: Any) -> bool:
    given, expected = final_answer(text), str(right).rpartition("####")[2].strip()
    if given is None:
        return False
    if latex.number(given) is not None or latex.same(given, expected):
        return latex.same(given, expected)
    return latex.number(expected) is not None and latex.last_number(given) == latex.number(expected)


def math_answer(texts: Texts, prompts: Texts, answer: Sequence) -> Scores:
    r"""Return format and correctness of a competition answer, in [0, 3].

    0.5 for reasoning and then answer tags, 0.5 for a \boxed answer inside the answer tags, 2 for the right answer.
    """
    return _judge(_math_answer, texts, answer)


def _math_answer(text: str, right: Any) -> float:
    is_boxed = latex.last_boxed(answer_of(text) or "") is not None
    return 0.5 * _is_loose(text) + 0.5 * is_boxed + 2.0 * _same_answer(text, right)


def math_accuracy(texts: Texts, prompts: Texts, answer: Sequence) -> Scores:
    r"""Return 1 where the last \boxed of a text, else its `final_answer`, is right up to its spelling in LaTeX, else 0.

    This is d1's `is_equiv`. ESPO and JustGRPO use a computer algebra system, which also equates 2x + 2 and 2(x + 1). The
    column `answer` has answers alone or in the last \boxed, as in MATH's column `solution`.
    """
    return _judge(_same_answer, texts, answer)


def _same_answer(text: str, right: Any) -> bool:
    given = latex.last_boxed(text)
    given = final_answer(text) if given is None else given
    return given is not None and latex.same(given, latex.last_boxed(str(right)) or str(right))
