"""Final answers written in LaTeX: found in a text, brought to one spelling, compared. The rules are ours."""

from __future__ import annotations

import re
from fractions import Fraction

_DROPPED = re.compile(r"\\[!,;: ]|\\left|\\right|\\displaystyle|\^\{?\\circ\}?|\\degree|\\?%|\\?\$|\\\(|\\\)|~")
_WORDS = re.compile(r"\\(?:text|textbf|textit|mbox|mathrm|mathbf)\{([^{}]*)\}")
_THOUSANDS = re.compile(r"[+-]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
_NUMBER = re.compile(r"([+-]?)(?:(\d*\.?\d+)|\\frac\{([+-]?\d+)\}\{([+-]?\d+)\})")
_WRITTEN = re.compile(r"(?<![\w.^])([+-]?)\\?\$?((?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+|/\d+)?|\.\d+)")
_BOX = re.compile(r"\\(?:boxed|fbox)(?:\s*(?P<brace>\{)|\s+(?P<bare>[^\s{}$][^$\n]*))")
LONGEST_NUMBER = 100  # characters; Python refuses to read some thousands of digits


def last_boxed(text: str) -> str | None:
    r"""What the last \boxed{...} (or \fbox) of `text` holds, with its braces matched; None if there is none.

    A \boxed without braces holds what follows it up to a $ or the line's end, as the Hendrycks MATH code reads it.
    """
    boxes = list(_BOX.finditer(text))
    if not boxes:
        return None
    if boxes[-1]["bare"]:
        return boxes[-1]["bare"].strip()
    start, depth = boxes[-1].end(), 1
    for end in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[start:end].strip()
    return None


def normalised(answer: str) -> str:
    r"""One spelling for what is written in many ways.

    Spacing, sizes, degree, percent and dollar signs are dropped; units in \text{} are dropped after a value and kept where
    they are the whole answer; \dfrac and \tfrac, \frac12, \sqrt2 and 1/2 get the form with braces; "x = 3" is 3, "1,000" is
    1000, ".5" is 0.5, and a full stop at the end goes.
    """
    text = _DROPPED.sub("", answer.strip().replace("{,}", ",")).strip()
    text = (_WORDS.sub("", text).strip() or _WORDS.sub(r"\1", text)).rstrip(".")
    if "frac" not in text:
        text = re.sub(r"(?<=\d)\s+(?=\d)(?!\d{3}\b)", ";", text)  # 1 27 is two numbers, 1 270 is one
    text = re.sub(r"\s+", "", text)
    text = re.sub(r"\\[dtc]frac", r"\\frac", text)
    text = re.sub(r"\\frac(\w)(?=[\w{])", r"\\frac{\1}", text)
    text = re.sub(r"(\\frac\{[^{}]*\})(\w)", r"\1{\2}", text)
    text = re.sub(r"\\sqrt(\w)", r"\\sqrt{\1}", text)
    text = re.sub(r"^[A-Za-z]=", "", text)
    text = re.sub(r"^([+-]?\d+)/(\d+)$", r"\\frac{\1}{\2}", text)
    text = re.sub(r"(?<!\d)\.(?=\d)", "0.", text)
    return text.replace(",", "") if _THOUSANDS.fullmatch(text) else text


def same(answer: str, expected: str) -> bool:
    """Whether two answers are the same after `normalised`, as text or, where both are plain numbers, in value."""
    a, b = normalised(answer), normalised(expected)
    return a == b or (_number(a) is not None and _number(a) == _number(b))


def number(answer: str) -> Fraction | None:
    """The value of an answer that is a number and nothing else, after `normalised`; None of anything else."""
    return _number(normalised(answer))


def last_number(text: str) -> Fraction | None:
    r"""The value of the last number in a text: digits with a sign, $, thousands' commas, a decimal part or a fraction.

    Digits that belong to a word or an exponent (x1, m^2) are not numbers. None if there is none.
    """
    plain = re.sub(r"\\[dtc]?frac\{(\d+)\}\{(\d+)\}", r"\1/\2", text)
    found = _WRITTEN.findall(plain)
    return number(found[-1][0] + found[-1][1]) if found else None


def _number(text: str) -> Fraction | None:
    match = _NUMBER.fullmatch(text) if len(text) <= LONGEST_NUMBER else None
    if match is None or (match[4] and not int(match[4])):
        return None
    size = Fraction(match[2]) if match[2] else Fraction(int(match[3]), int(match[4]))
    return -size if match[1] == "-" else size
