"""Final answers in LaTeX: find, normalise and compare them. The rules are ours."""

from __future__ import annotations

import re
from fractions import Fraction

_DROPPED = re.compile(r"\\[!,;: ]|\\left|\\right|\\displaystyle|\^\{?\\circ\}?|\\degree|\\?%|\\?\$|\\\(|\\\)|~")
_WORDS = re.compile(r"\\(?:text|textbf|textit|mbox|mathrm|mathbf)\{([^{}]*)\}")
_THOUSANDS = re.compile(r"[+-]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
_NUMBER = re.compile(r"([+-]?)(?:(\d*\.?\d+)|\\frac\{([+-]?\d+)\}\{([+-]?\d+)\})")
_WRITTEN = re.compile(r"(?<![\w.^])([+-]?)\\?\$?((?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+|/\d+)?|\.\d+)")
_BOX = re.compile(r"\\(?:boxed|fbox)(?:\s*(?P<brace>\{)|\s+(?P<bare>[^\s{}$][^$\n]*))")
LONGEST_NUMBER = 100  # characters; int() refuses thousands of digits


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last \boxed{...} or \fbox{...}, with matched braces; None if there is none.

    A \boxed without braces extends to a $ or the line's end, as in the Hendrycks MATH code.
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


def normalise(answer: str) -> str:
    r"""Return one spelling of an answer.

    Spacing, sizes and signs of degree, percent and dollar are dropped; units in \text{} are dropped after a value and kept
    if they are the whole answer; \dfrac and \tfrac, \frac12, \sqrt2 and 1/2 get braces; "x = 3" becomes 3, "1,000" 1000,
    ".5" 0.5; a final full stop is dropped.
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
    """Return whether two answers are equal after `normalise`, as text or as numbers."""
    a, b = normalise(answer), normalise(expected)
    return a == b or (_number(a) is not None and _number(a) == _number(b))


def number(answer: str) -> Fraction | None:
    """Return the value of an answer that is a number after `normalise`, else None."""
    return _number(normalise(answer))


def last_number(text: str) -> Fraction | None:
    """Return the value of a text's last number: digits with a sign, $, commas, decimals or a fraction; or None.

    Digits of a word or an exponent (x1, m^2) are not numbers.
    """
    plain = re.sub(r"\\[dtc]?frac\{(\d+)\}\{(\d+)\}", r"\1/\2", text)
    numbers = _WRITTEN.findall(plain)
    return number("".join(numbers[-1])) if numbers else None


def _number(text: str) -> Fraction | None:
    match = _NUMBER.fullmatch(text) if len(text) <= LONGEST_NUMBER else None
    if match is None or (match[4] and not int(match[4])):
        return None
    size = Fraction(match[2]) if match[2] else Fraction(int(match[3]), int(match[4]))
    return -size if match[1] == "-" else size
