"""Arithmetic expressions in text, parsed with `ast` and computed node by node: nothing is ever run as Python."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable

LONGEST = 1000  # characters; far more than any answer needs, far less than the parser's stack
_ALLOWED = re.compile(r"[0-9+\-*/().\s]+")
_LARGEST_POWER = 4096  # bits


class NotArithmetic(ValueError):
    """The text is not an arithmetic expression, or it has no real value."""


def value(text: str) -> int | float:
    """The value of `text`, with Python's numbers, precedence and operators + - * / // **.

    Raises:
        NotArithmetic: it holds anything but digits, + - * / ( ) . and white space, is longer than `LONGEST`, does not
            parse, divides by zero, or leaves the real numbers or the size that is worth computing.
    """
    if len(text) > LONGEST or not _ALLOWED.fullmatch(text):
        raise NotArithmetic(f"not an arithmetic expression: {text[:80]!r}")
    try:
        return _computed(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ArithmeticError, RecursionError, MemoryError) as error:
        raise NotArithmetic(f"{text[:80]!r}: {error}") from None


def _computed(node: ast.expr) -> int | float:
    if isinstance(node, ast.Constant) and (type(node.value) is int or type(node.value) is float):
        return node.value
    if isinstance(node, ast.UnaryOp) and type(node.op) in _SIGNS:
        return _SIGNS[type(node.op)](_computed(node.operand))
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_computed(node.left), _computed(node.right))
    raise NotArithmetic(f"{type(node).__name__} is not arithmetic")


def _power(base: int | float, exponent: int | float) -> int | float:
    if isinstance(base, int) and base.bit_length() * abs(exponent) > _LARGEST_POWER:
        raise NotArithmetic("the power is too large")
    result = base**exponent
    if isinstance(result, complex):
        raise NotArithmetic("the power is not real")
    return result


_SIGNS: dict[type[ast.unaryop], Callable[[float], float]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_OPERATIONS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: _power,
}
