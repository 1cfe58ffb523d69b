"""Split tests into statements that a program runs, conditions to check, and constants known without the program."""

from __future__ import annotations

import ast
import builtins
import copy
import itertools
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

_MOST_ROUNDS = 1000  # of a loop that is unrolled


@dataclass(frozen=True)
class Do:
    """Statements to run; if `decides`, the test passes when they raise nothing."""

    source: str
    decides: bool


@dataclass(frozen=True)
class Check:
    """An asserted condition."""

    condition: ast.expr


@dataclass(frozen=True)
class SplitTest:
    """A test as steps in order. Its claims are negated in the first process if `denied`, otherwise in the second."""

    steps: tuple[Do | Check, ...]
    denied: bool


def split(test: str) -> SplitTest:
    """Split a test into steps, with a final `check(candidate)` inlined; raise SyntaxError if it does not parse."""
    tree = ast.parse(test)
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            node.msg = None  # only the program would read it
    body = _unfold(tree.body)
    checked = any(isinstance(statement, ast.Assert) for statement in body)
    steps: list[Do | Check] = []
    for asserted, statements in itertools.groupby(body, lambda statement: isinstance(statement, ast.Assert)):
        if asserted:
            steps += [Check(each.test) for each in statements if isinstance(each, ast.Assert)]
        else:
            block = ast.fix_missing_locations(_Guard().visit(ast.Module(list(statements), [])))
            inner = any(isinstance(node, ast.Assert) for node in ast.walk(block))
            steps.append(Do(ast.unparse(block), inner or not checked))
    return SplitTest(tuple(steps), secrets.randbelow(2) == 1)


def _unfold(body: list[ast.stmt]) -> list[ast.stmt]:
    """Inline a one-parameter check function that the last statement calls, and unroll loops over literals."""
    *before, check, call = body if len(body) > 1 else [None, None]
    match check, call:
        case (
            ast.FunctionDef(
                name=name, args=ast.arguments(posonlyargs=[], args=[parameter], vararg=None, kwonlyargs=[], kwarg=None)
            ),
            ast.Expr(ast.Call(ast.Name(called), [ast.Name() as argument], [])),
        ) if name == called and not any(isinstance(node, _SCOPED) for node in ast.walk(ast.Module(check.body, []))):
            filled = _fill(check.body, {parameter.arg: argument})
            body = [*before, *filled] if filled else body
    return _postpone([plain for statement in body for plain in _unroll(statement)])


_SCOPED = (ast.Return, ast.Yield, ast.YieldFrom, ast.Global, ast.Nonlocal, ast.FunctionDef, ast.Lambda, ast.ClassDef)


def _postpone(body: list[ast.stmt]) -> list[ast.stmt]:
    """Substitute literals for names that occur only in asserted comparisons; assign the names last, for later tests."""
    kept: list[ast.stmt] = []
    late: list[ast.stmt] = []
    names: dict[str, ast.expr] = {}
    for statement in body:
        match statement:
            case ast.Assign([ast.Name(name)], literal) if is_literal(literal) and _is_only_compared(name, body):
                names[name] = literal
                late.append(statement)
            case ast.Assert():
                kept += _fill([statement], names) or [statement]
            case _:
                kept.append(statement)
    return kept + late


def _is_only_compared(name: str, body: list[ast.stmt]) -> bool:
    uses = [node for node in ast.walk(ast.Module(body, [])) if isinstance(node, ast.Name) and node.id == name]
    sides = {
        id(side)
        for statement in body
        if isinstance(statement, ast.Assert)
        for node in ast.walk(statement.test)
        if isinstance(node, ast.Compare)
        for side in (node.left, *node.comparators)
    }
    loads = [node for node in uses if isinstance(node.ctx, ast.Load)]
    return bool(loads) and len(uses) == len(loads) + 1 and all(id(node) in sides for node in loads)


def _unroll(statement: ast.stmt) -> list[ast.stmt]:
    """Return the assertions of all rounds of a loop over literals; return any other statement unchanged."""
    rounds: list[dict[str, ast.expr] | None]
    match statement:
        case ast.For(target, ast.List(items) | ast.Tuple(items), body, []) if all(
            isinstance(inner, ast.Assert) for inner in body
        ):
            rounds = [_bind(target, item, body) for item in items]
        case ast.For(ast.Name(name), ast.Call(ast.Name("range"), [*ends], []), body, []) if all(
            isinstance(inner, ast.Assert) for inner in body
        ) and all(isinstance(end, ast.Constant) and isinstance(end.value, int) for end in ends):
            numbers = range(*(ast.literal_eval(end) for end in ends))[: _MOST_ROUNDS + 1]
            rounds = [{name: ast.Constant(number)} for number in numbers]
        case _:
            return [statement]
    unrolled = [new for names in rounds if names is not None and (new := _fill(body, names)) is not None]
    if len(unrolled) < len(rounds) or len(rounds) > _MOST_ROUNDS:
        return [statement]
    return [inner for assertions in unrolled for inner in assertions]


def _bind(target: ast.expr, item: ast.expr, body: list[ast.stmt]) -> dict[str, ast.expr] | None:
    """Return the literal of each loop variable in one round; None if an item is no literal, or `body` may change it."""
    if isinstance(target, ast.Tuple) and isinstance(item, ast.Tuple) and len(target.elts) == len(item.elts):
        pairs = list(zip(target.elts, item.elts, strict=True))
    else:
        pairs = [(target, item)]
    used = [node.id for node in ast.walk(ast.Module(body, [])) if isinstance(node, ast.Name)]
    bound: dict[str, ast.expr] = {}
    for name, literal in pairs:
        if not isinstance(name, ast.Name) or not is_literal(literal):
            return None
        if used.count(name.id) > 1 and any(isinstance(part, _CHANGEABLE) for part in ast.walk(literal)):
            return None
        bound[name.id] = literal
    return bound


_CHANGEABLE = (ast.List, ast.Set, ast.Dict)


def _fill(body: list[ast.stmt], names: dict[str, ast.expr]) -> list[ast.stmt] | None:
    """Substitute expressions for names in `body`; None if it assigns to one of them."""
    for node in ast.walk(ast.Module(body, [])):
        if isinstance(node, ast.Name) and node.id in names and not isinstance(node.ctx, ast.Load):
            return None
    return [_Fill(names).visit(copy.deepcopy(statement)) for statement in body]


class _Fill(ast.NodeTransformer):
    def __init__(self, names: dict[str, ast.expr]):
        self.names = names

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self.names.get(node.id, node)


class _Guard(ast.NodeTransformer):
    """Replace a == b asserted inside other statements by `__same__(a, b)`, false if an object equals everything."""

    def visit_Assert(self, node: ast.Assert) -> ast.Assert:
        match node.test:
            case ast.Compare(left, [ast.Eq()], [right]):
                node.test = ast.Call(ast.Name("__same__", ast.Load()), [left, right], [])
        return node


@dataclass(frozen=True)
class Constants:
    """Compared expressions of tests that can be computed without the program, and the imports of the tests."""

    imports: tuple[str, ...]
    expressions: tuple[str, ...]


def constants(tests: Iterable[SplitTest]) -> Constants:
    """Return the compared expressions that use only builtins and imported names."""
    imports, expressions = {}, {}
    for test in tests:
        names = set(dir(builtins))
        for step in test.steps:
            if isinstance(step, Do):
                for statement in ast.parse(step.source).body:
                    if isinstance(statement, ast.Import | ast.ImportFrom):
                        imports[ast.unparse(statement)] = True
                        names |= {(each.asname or each.name).partition(".")[0] for each in statement.names}
            else:
                for side in _sides(step.condition):
                    loaded = {node.id for node in ast.walk(side) if isinstance(node, ast.Name)}
                    bound = {arg.id for node in ast.walk(side) if isinstance(node, ast.comprehension)
                             for arg in ast.walk(node.target) if isinstance(arg, ast.Name)}  # fmt: skip
                    if loaded - bound <= names:
                        expressions[ast.unparse(side)] = True
    return Constants(tuple(imports), tuple(expressions))


def _sides(node: ast.expr) -> Iterator[ast.expr]:
    match node:
        case ast.BoolOp(_, values):
            for value in values:
                yield from _sides(value)
        case ast.UnaryOp(ast.Not(), operand):
            yield from _sides(operand)
        case ast.Compare(left, [sign], [right]) if not is_literal(left) and not is_literal(right):
            yield right
            if not isinstance(sign, ast.In | ast.NotIn):
                yield left


def is_literal(node: ast.expr) -> bool:
    """Return whether `ast.literal_eval` can evaluate an expression."""
    try:
        ast.literal_eval(node)
    except (TypeError, ValueError, RecursionError, MemoryError):
        return False
    return True
