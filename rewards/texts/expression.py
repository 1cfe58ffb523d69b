"""Evaluate arithmetic expressions node by node with `ast`; nothing is run as Python."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable

LONGEST = 1000  # characters; more than an answer needs, less than the parser's stack allows
_ALLOWED = re.compile(r"[0-9+\-*/().\s]+")
_LARGEST_POWER = 4096  # bits


class NotArithmetic(ValueError):
    """The text is no arithmetic expression or has no real value."""


def value(text: str) -> int | float:
    """Return the value of `text` with Python's numbers, precedence and operators + - * / // **.

    Raises:
        NotArithmetic: it has other characters than digits, + - * / ( ) . and white space, is longer than `LONGEST`, does
            not parse, divides by zero, or has a power that is too large or not real.
    """
    if len(text) > LONGEST or not _ALLOWED.fullmatch(text):
        raise NotArithmetic(f"not an arithmetic expression: {text[:80]!r}")
    try:
        return _compute(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ArithmeticError, RecursionError, MemoryError) as error:
        raise NotArithmetic(f"{text[:80]!r}: {error}") from None


def _compute(node: ast.expr) -> int | float:
    if isinstance(node, ast.Constant) and (type(node.value) is int or type(node.value) is float):
        return node.value
    if isinstance(node, ast.UnaryOp) and type(node.op) in _SIGNS:
        return _SIGNS[type(node.op)](_compute(node.operand))
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_compute(node.left), _compute(node.right))
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
