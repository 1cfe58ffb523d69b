"""Examine a program without giving it the expected answers.

A test that runs in the program's own process must believe what that process says. Therefore

1. For `assert LEFT == LITERAL`, other comparisons with a literal, and `and`, `or`, `not` of these, the process computes LEFT
   alone. The literal stays here, and values are compared here as Python compares plain data. In place of the literal may be
   an expression of Python's own names (`sorted([2, 1])`), which is computed in a process without the program.
2. Everything else is a claim of the process. Each such test is put to two separate processes, as it is and negated. A
   program that affirms both scores nothing.
3. Some questions are canaries, with known replies. One wrong reply scores nothing.
"""

from __future__ import annotations

import ast
import itertools
import math
import operator
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from rewards.sandbox.split_tests import Check, Do, SplitTest, is_literal

CANARIES = 3  # in each process
_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
    ast.Is: lambda a, b: type(a) is type(b) and a == b,
    ast.IsNot: lambda a, b: type(a) is not type(b) or a != b,
}
MOST_HASHED = 1000  # as in rewards/jail/trial.py
_UNCOMPUTED = (TypeError, ValueError, ArithmeticError, RecursionError, MemoryError)


class Cheating(Exception):
    """The process gave a reply that no honest program gives."""


class Raised(Exception):
    """A question raised an exception in the process."""


@dataclass(frozen=True, eq=False)
class Opaque:
    """A value that is not plain data: its truth is known, and it equals only itself."""

    truth: bool

    def __bool__(self) -> bool:
        return self.truth


Ask = Callable[..., list]


class Examiner:
    """The examination of one process.

    `ask(kind, *sources)` sends a question and returns the reply, see `rewards/jail/trial.py`. `known` maps the expressions
    of `split_tests.constants` to their plain values. A `second` process gets claims in the opposite form to the first.
    """

    def __init__(self, ask: Ask, known: Mapping[str, Any], second: bool = False):
        self._ask, self._known, self._second = ask, known, second
        self._denied = self._claimed = False

    def passes(self, test: SplitTest, passed_before: bool = False) -> tuple[bool, bool]:
        """Return whether a test passes, and whether by a claim of the process.

        Raise Cheating if the test `passed_before`, in the first process, and a claim of this process contradicts that.
        """
        self._denied, self._claimed = test.denied != self._second, False
        try:
            passed = all(self._holds(step, passed_before) for step in test.steps)
        except (Raised, *_UNCOMPUTED):
            passed = False
        return passed, self._claimed

    def canary(self) -> None:
        """Ask for something with a known reply; raise Cheating if another one comes."""
        if secrets.randbelow(2):
            self._must_fail("pass")
        else:
            a, b = secrets.token_hex(4), secrets.token_hex(4)
            try:
                [value] = self._request("value", f"{a!r} + {b!r}")
            except Raised:
                value = None
            if value != a + b:
                raise Cheating("a canary's value is wrong")

    def _holds(self, step: Do | Check, passed_before: bool) -> bool:
        if isinstance(step, Check):
            earlier, self._claimed = self._claimed, False
            holds = bool(self._value(step.condition))
            if passed_before and self._claimed and not holds:
                raise Cheating("a test passes as it is and denied")
            self._claimed |= earlier
            return holds
        if step.decides:
            self._claimed = True
            if self._second:
                self._must_fail(step.source)
                return True
        self._request("do", step.source)
        return True

    def _must_fail(self, source: str) -> None:
        a, b = secrets.token_hex(4), secrets.token_hex(4)
        end = secrets.choice(("assert False", f"assert {a!r} == {b!r}"))
        try:
            self._request("do", f"{source}\n{end}")
        except Raised:
            return
        raise Cheating("a test passes that cannot")

    def _request(self, kind: str, *sources: str) -> list:
        outcome, *values = self._ask(kind, *sources)
        if outcome == "raised":
            raise Raised(*values)
        return values

    def _value(self, node: ast.expr) -> Any:
        """Return the value of an asserted expression, or of an operand of `and`, `or` or `not` in it."""
        match node:
            case ast.BoolOp(ast.And(), values):
                return all(self._value(value) for value in values)
            case ast.BoolOp(ast.Or(), values):
                return any(self._value(value) for value in values)
            case ast.UnaryOp(ast.Not(), operand):
                return not self._value(operand)
            case ast.Compare(left, [sign], [right]) if (source := ast.unparse(right)) in self._known:
                return _COMPARISONS[type(sign)](self._operand(left), self._known[source])
            case ast.Compare(left, [sign], [right]) if (
                not isinstance(sign, ast.In | ast.NotIn) and (source := ast.unparse(left)) in self._known
            ):
                return _COMPARISONS[type(sign)](self._known[source], self._operand(right))
            case ast.Compare(left, operators, rights) if _is_judged_here(node):
                a = self._operand(left)
                for sign, right in zip(operators, rights, strict=True):
                    b = self._operand(right)
                    if not _COMPARISONS[type(sign)](a, b):
                        return False
                    a = b
                return True
            case ast.Call(ast.Attribute(ast.Name("math"), "isclose"), [left, right], options) if _is_number(
                left
            ) != _is_number(right) and all(option.arg and is_literal(option.value) for option in options):
                given = {str(option.arg): ast.literal_eval(option.value) for option in options}
                return math.isclose(self._operand(left), self._operand(right), **given)
            case ast.Compare(left, [ast.Eq() | ast.NotEq() | ast.In() | ast.NotIn() as sign], [right]):
                return self._compare(left, type(sign), right)
        return self._claim(node)

    def _operand(self, node: ast.expr) -> Any:
        """Return the value of one side of a comparison: a literal, abs(x - number) taken here, or the process's reply."""
        match node:
            case ast.Call(ast.Name("abs"), [ast.BinOp(left, ast.Sub(), right)], []) if _is_number(left) != _is_number(
                right
            ):
                return abs(self._operand(left) - self._operand(right))
        if is_literal(node):
            return ast.literal_eval(node)
        [value] = self._request("value", ast.unparse(node))
        return value

    def _claim(self, node: ast.expr) -> bool:
        self._claimed = True
        source = ast.unparse(node)
        truth, equals_all = self._request("claim", f"not ({source})" if self._denied else source)
        return self._judge(truth, equals_all)

    def _compare(self, left: ast.expr, sign: type[ast.cmpop], right: ast.expr) -> bool:
        """Compare two values that are not literals: judge plain data here, else take the process's claim."""
        asked, denied = _SIGNS[sign]
        a, b, truth, equals_all = self._request(
            "pair", ast.unparse(left), ast.unparse(right), denied if self._denied else asked
        )
        claim = self._judge(truth, equals_all)
        if is_plain(b) or (is_plain(a) and (sign in (ast.Eq, ast.NotEq) or not isinstance(b, Opaque))):
            return _COMPARISONS[sign](a, b)
        self._claimed = True
        return claim

    def _judge(self, truth: Any, equals_all: Any) -> bool:
        if equals_all:
            raise Cheating("an object equals everything")
        return bool(truth) != self._denied


_SIGNS = {ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.In: ("in", "not in"), ast.NotIn: ("not in", "in")}


def _is_number(node: ast.expr) -> bool:
    return is_literal(node) and isinstance(ast.literal_eval(node), int | float)


def _is_judged_here(node: ast.Compare) -> bool:
    """Return whether each comparison has a literal side; for `in` it must be the right one, whose type defines `in`."""
    operands = [node.left, *node.comparators]
    return all(
        is_literal(right) if isinstance(sign, ast.In | ast.NotIn) else is_literal(left) or is_literal(right)
        for left, sign, right in zip(operands, node.ops, operands[1:], strict=False)
    )


def is_plain(value: Any) -> bool:
    """Return whether no part of a value is `Opaque`."""
    if isinstance(value, dict):
        return all(map(is_plain, itertools.chain(value, value.values())))
    if isinstance(value, list | tuple | frozenset):
        return all(map(is_plain, value))
    return not isinstance(value, Opaque)


_KINDS: dict[str, Callable[[Any], Any]] = {
    "tuple": tuple,
    "set": frozenset,
    "dict": dict,
    "bytes": bytes.fromhex,
    "complex": lambda parts: complex(*parts),
    "ratio": lambda parts: Fraction(*parts),
    "object": lambda truth: Opaque(bool(truth)),
}


def rebuild(tagged: dict[str, Any]) -> Any:
    """Return the plain value of a JSON object of `rewards/jail/trial.py`, as an `object_hook`, or raise ValueError."""
    if len(tagged) != 1 or not tagged.keys() <= _KINDS.keys():
        raise ValueError("no value of a trial")
    [(kind, content)] = tagged.items()
    if kind in ("set", "dict") and len(content) > MOST_HASHED:
        raise ValueError("more elements than a trial sends")
    return _KINDS[kind](content)
