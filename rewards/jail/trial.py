"""A trial: load a program, then reply to questions about it, one by one.

A question is a line of JSON, [nonce, kind, source, ...]; the reply is [nonce, outcome, ...] with the outcome

- of `load` and `do` (statements): "done";
- of `value` (an expression): "value" and the value;
- of `claim` (an expression): "claim", its truth, and whether it equals unrelated made-up objects, as only a cheat does;
- of `pair` (two expressions and one of `_SIGNS`): "pair", both values, the result of the comparison, and whether either
  equals the made-up objects;
- of any kind, after an exception: "raised" and why.

Values of plain data are sent as JSON. Tuples, sets, dictionaries, bytes and other numbers become an object whose only key
is their kind. Instances of a subclass count as their base. Everything else becomes {"object": truth}, also sets and
dictionaries of more than `MOST_HASHED` elements.
"""

import io
import sys
from json import dumps, loads

LONGEST_REPLY = 1 << 20  # bytes
MOST_HASHED = 1000  # elements of a set or a dictionary; slow to rebuild if they collide
_LONGEST_COMPLAINT = 500
_DICT_VIEWS: tuple[type, ...] = type({}.keys()), type({}.items())


def run(questions, say):
    """Reply to each line of `questions` by `say(line)`."""
    names = {"__name__": "answer", "__same__": _same}
    for question in questions:
        nonce, kind, *sources = loads(question)
        try:
            reply = dumps([nonce, *_KINDS[kind](names, *sources)])
            if len(reply) > LONGEST_REPLY:
                raise OverflowError(f"a value of {len(reply)} bytes")
        except BaseException as error:  # SystemExit and KeyboardInterrupt are an answer's too
            reply = dumps([nonce, "raised", _complaint(error)])
        say(reply)


def _complaint(error):
    try:
        return " ".join(f"{type(error).__name__}: {error}".split())[:_LONGEST_COMPLAINT]
    except BaseException:
        return "an exception that cannot be told"


class _NoInput(io.RawIOBase):
    """An empty standard input that records reads."""

    asked = False

    def readable(self):
        return True

    def fileno(self):
        return 0

    def readinto(self, buffer):
        self.asked = True
        return 0


def _load(names, code):
    """Run a program; once it has read from its empty input, failing statements are skipped."""
    nothing = _NoInput()
    sys.stdin = io.TextIOWrapper(io.BufferedReader(nothing))
    try:
        exec(compile(code, "<answer>", "exec"), names)
    except (Exception, SystemExit) as error:
        if not nothing.asked:
            raise
        _load_below(error.__traceback__.tb_next.tb_lineno, names, code)
    return ["done"]


def _load_below(line, names, code):
    """Run the statements below a line and skip failing ones."""
    import ast

    body = ast.parse(code).body
    future = [node for node in body if isinstance(node, ast.ImportFrom) and node.module == "__future__"]
    for node in body:
        if node.lineno > line:
            try:
                exec(compile(ast.Module([*future, node], []), "<answer>", "exec"), names)
            except (Exception, SystemExit):
                continue


def _do(names, source):
    exec(compile(source, "<test>", "exec"), names)
    return ["done"]


def _value(names, source):
    return ["value", _plain(eval(compile(source, "<test>", "eval"), names))]


def _claim(names, source):
    value = eval(compile(source, "<test>", "eval"), names)
    return ["claim", bool(value), _equals_all(value)]


def _pair(names, left, right, sign):
    a, b = (eval(compile(source, "<test>", "eval"), names) for source in (left, right))
    return ["pair", _plain(a), _plain(b), _truth(_SIGNS[sign](a, b)), _equals_all(a) or _equals_all(b)]


_SIGNS = {
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "in": lambda a, b: a in b,
    "not in": lambda a, b: a not in b,
}
_KINDS = {"load": _load, "do": _do, "value": _value, "claim": _claim, "pair": _pair}


def _same(a, b):
    """Compare two values inside a statement, whose equality cannot be judged outside the process."""
    return a == b and not _equals_all(a) and not _equals_all(b)


def _equals_all(value):
    class Other:
        __hash__ = object.__hash__

        def __eq__(self, _):
            return NotImplemented

    return all(_equal(value, other) for other in (Other(), "8d1f", -7.25, (None,)))


def _equal(a, b):
    try:
        return bool(a == b)
    except BaseException:
        return False


def _truth(value):
    try:
        return bool(value)
    except BaseException:
        return False


def _plain(value):
    kind = type(value)
    if value is None or issubclass(kind, (bool, int, float, str)):
        return value
    if issubclass(kind, list):
        return [_plain(item) for item in list.__iter__(value)]
    if issubclass(kind, tuple):
        return {"tuple": [_plain(item) for item in tuple.__iter__(value)]}
    if issubclass(kind, (dict, set, frozenset, *_DICT_VIEWS)) and len(value) > MOST_HASHED:
        return {"object": _truth(value)}
    if issubclass(kind, dict):
        return {"dict": [[_plain(key), _plain(item)] for key, item in dict.items(value)]}
    if issubclass(kind, (set, frozenset, *_DICT_VIEWS)):
        return {"set": [_plain(item) for item in value]}
    if issubclass(kind, (bytes, bytearray)):
        return {"bytes": bytes(value).hex()}
    if issubclass(kind, complex):
        return {"complex": [value.real, value.imag]}
    if kind.__module__ in ("fractions", "decimal") and hasattr(value, "as_integer_ratio") and value - value == 0:
        return {"ratio": [*value.as_integer_ratio()]}
    return {"object": _truth(value)}
