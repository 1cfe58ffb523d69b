"""Right programs of many kinds with their tests: each must score 1. What a test expects is computed here, not by them."""

# ruff: noqa: E501

import itertools
import math

FAMILIES = {
    "a function": lambda k: (
        f"def f(x):\n    return {k} * x",
        [
            f"assert f(3) == {3 * k}",
            f"wanted = {'a' * k!r}\nassert f('a') == wanted",
            f"assert f('a') == wanted\nwanted = {k}\nassert f(1) == wanted and [1] * f(1) != wanted",
            f"x = [{k}]\nassert f(x) == x * {k} and x == [{k}]",
            "x = 2\nx += 1\nassert x == 3 and wanted == f(1)",
        ],
    ),
    "recursion": lambda k: (
        "def f(n):\n    return 1 if n < 2 else n * f(n - 1)",
        [f"assert f({k + 5}) == {math.factorial(k + 5)}", f"assert f({k * 40}) == {math.factorial(k * 40)}"],
    ),
    "a loop": lambda k: (
        "def f(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return a",
        [
            f"for n, wanted in {[(n, round(((1 + 5**0.5) / 2) ** n / 5**0.5)) for n in range(k + 3)]}:\n    assert f(n) == wanted"
        ],
    ),
    "a class": lambda k: (
        "class Stack:\n    def __init__(self):\n        self.items = []\n    def push(self, x):\n        self.items.append(x)\n"
        "    def pop(self):\n        return self.items.pop()\n    def __len__(self):\n        return len(self.items)\n"
        "    def empty(self):\n        return not self.items",
        [
            "s = Stack()\nassert s.empty()",
            f"s.push({k})\ns.push('x')\nassert len(s) == 2",
            "assert s.pop() == 'x'",
            f"assert s.pop() == {k} and s.empty()",
            "try:\n    s.pop()\n    assert False\nexcept IndexError:\n    pass",
        ],
    ),
    "a class with equality": lambda k: (
        "class V:\n    def __init__(self, x, y):\n        self.x, self.y = x, y\n"
        "    def __eq__(self, o):\n        return self.x == o.x and self.y == o.y\n"
        "    def __add__(self, o):\n        return V(self.x + o.x, self.y + o.y)\n"
        "    def __abs__(self):\n        return (self.x ** 2 + self.y ** 2) ** 0.5\n"
        "    def __repr__(self):\n        return f'V({self.x}, {self.y})'",
        [
            f"assert V(1, {k}) + V(2, 3) == V(3, {k + 3})",
            f"assert V(1, {k}) != V(2, {k})",
            f"assert abs(V({3 * k}, {4 * k})) == {5.0 * k}",
            f"assert repr(V({k}, 2)) == 'V({k}, 2)'",
            f"assert [V(1, {k})] == [V(1, {k})] and V({k}, 1) in [V(0, 0), V({k}, 1)]",
            f"assert not V(1, {k}) == V(1, {k + 1})",
        ],
    ),
    "a data class": lambda k: (
        "from dataclasses import dataclass, field\n@dataclass(order=True)\nclass P:\n    x: int\n"
        "    tags: list = field(default_factory=list)",
        [
            f"assert P({k}) == P({k}, [])",
            f"assert P({k}).tags == []",
            f"assert P({k}) < P({k + 1})",
            f"assert P({k}).x is {k}",
        ],
    ),
    "a generator": lambda k: (
        "def f(n):\n    for i in range(n):\n        yield i * i",
        [
            f"assert list(f({k})) == {[i * i for i in range(k)]}",
            f"g = f({k + 2})\nassert next(g) == 0",
            "assert next(g) == 1",
            f"assert sum(f({k})) == {sum(i * i for i in range(k))}",
            f"assert {k * k} in f({k + 1})",
        ],
    ),
    "the library": lambda k: (
        "import collections, heapq, itertools, functools, re\n"
        "def count(t):\n    return collections.Counter(t)\ndef top(x, n):\n    return heapq.nlargest(n, x)\n"
        "def pairs(x):\n    return list(itertools.combinations(x, 2))\n@functools.lru_cache\ndef words(t):\n    return re.findall(r'\\w+', t)\n"
        "def groups(x):\n    d = collections.defaultdict(list)\n    for i in x:\n        d[i % 2].append(i)\n    return d",
        [
            f"assert count('ab' + 'a' * {k}) == {{'a': {k + 1}, 'b': 1}}",
            f"assert top(range({k + 3}), 2) == {[k + 2, k + 1]}",
            f"assert pairs({list(range(k))}) == {list(itertools.combinations(range(k), 2))}",
            f"assert words('a b_{k} c!') == ['a', 'b_{k}', 'c']",
            f"assert groups([1, 2, {2 * k + 1}]) == {{0: [2], 1: [1, {2 * k + 1}]}}",
        ],
    ),
    "input at the top": lambda k: (
        f"def f(x):\n    return x + {k}\nn = int(input('n? '))\nTWICE = 2\nfor i in range(n):\n"
        "    print(f(i))\nx, y = map(int, input().split())\nprint(g(n))\ndef g(x):\n    return f(f(x)) * TWICE",
        [f"assert f(1) == {k + 1}", f"assert g(1) == {4 * k + 2}"],
    ),
    "all of the input": lambda k: (
        f"import sys\ndef f(x):\n    return x + {k}\ndata = sys.stdin.read().split()\nn = int(data[0])\nrest = data[1:]\n"
        "print(f(int(data[1])), f(n))\nif len(data) < 2:\n    sys.exit('no data')\ndef g(x):\n    return f(f(x)) - len(rest_or(()))\n"
        "def rest_or(other):\n    return other",
        [f"assert f(1) == {k + 1}", f"assert g(1) == {2 * k + 1}"],
    ),
    "lines of the input": lambda k: (
        f"import sys\ninput = sys.stdin.readline\ndef f(x):\n    return x * {k}\nn = int(input())\nfor line in sys.stdin:\n    print(f(int(line)))\n"
        "m = int(sys.stdin.buffer.readline())\nLIMIT = (sys.stdin.readlines() or [3])[0]\ndef g(x):\n    return min(x, LIMIT)",
        [f"assert f(2) == {2 * k}", f"assert g({k + 3}) == 3"],
    ),
    "input in a main": lambda k: (
        f"import sys\ndef f(x):\n    return x - {k}\ndef main():\n    print(f(int(input())))\n"
        "if __name__ == '__main__':\n    main()\nsys.stdin.read()",
        [f"assert f({k}) == 0", "try:\n    main()\nexcept EOFError:\n    pass\nelse:\n    assert False"],
    ),
    "print": lambda k: (
        f"def f(x):\n    print(x)\n    return x * {k}\nprint('hello', 'wörld')\nfor i in range(999):\n    print('[\"\", true]')",
        [
            f"assert f(2) == {2 * k}",
            "import io, contextlib\nwith contextlib.redirect_stdout(io.StringIO()) as said:\n    f(7)\n"
            "assert said.getvalue() == '7\\n'",
        ],
    ),
    "floats": lambda k: (
        "import math\ndef root(x):\n    return x ** 0.5\ndef area(r):\n    return math.pi * r * r\n"
        "def mean(x):\n    return sum(x) / len(x)\ndef shortest(x):\n    return min(x, default=float('inf'))",
        [
            f"assert root({k * k}) == {k}",
            f"assert abs(area({k}) - {math.pi * k * k}) < 1e-9",
            f"import math\nassert math.isclose(area({k}), {math.pi * k * k:.6f}, rel_tol=1e-4)",
            f"assert round(mean([1, {k}]), 3) == {round((1 + k) / 2, 3)}",
            "assert shortest([]) == float('inf')",
            f"assert abs(root(2) - math.sqrt(2)) < 1e-12 and {k} - 0.5 < root({k * k}) < {k} + 0.5",
        ],
    ),
    "exact numbers": lambda k: (
        "from fractions import Fraction\nfrom decimal import Decimal\n"
        f"def half(x):\n    return Fraction(x, 2)\ndef price(x):\n    return Decimal(x) / 4\ndef z(x):\n    return complex(x, {k})",
        [
            f"assert half({2 * k + 1}) == {k + 0.5}",
            f"assert price({k}) == {k / 4}",
            f"assert half({k}) == Fraction({k}, 2)",
            f"assert z(1) == 1+{k}j",
            f"assert abs(half({k}) - {k / 2}) <= 0",
        ],
    ),
    "truth": lambda k: (
        "def prime(n):\n    return n > 1 and all(n % d for d in range(2, int(n ** 0.5) + 1))",
        [
            f"assert prime({[2, 3, 5, 7, 11, 13, 17, 19][k % 8]})",
            f"assert not prime({4 * k})",
            f"assert prime(7) is True and prime({6 * k}) == False",
            f"assert prime(101) and not prime({9 * k}) or prime(4)",
        ],
    ),
    "text": lambda k: (
        f"def f(s):\n    return s[::-1].upper() + '{k}'\ndef g(s):\n    return {{c: s.count(c) for c in s}}",
        [
            f"assert f('straße') == 'ESSARTS{k}'",
            f"assert f('日本🙂') == '🙂本日{k}'",
            f"assert f('\\n\"\\\\\\ud800') == '\\ud800\\\\\"\\n{k}'",
            f"assert g('añ' * {k}) == {{'a': {k}, 'ñ': {k}}}",
            "assert 'ñ' in g('ñ')",
        ],
    ),
    "containers": lambda k: (
        "def f(x):\n    return set(x)\ndef g(x):\n    return tuple(sorted(x)), frozenset(x)\ndef h(x):\n    return {'k': [x, (x,), {x}]}\n"
        "def keys(d):\n    return d.keys()",
        [
            f"assert f([1, {k + 1}, 1]) == {{1, {k + 1}}}",
            f"assert g([3, {-k}]) == (({-k}, 3), {{3, {-k}}})",
            f"assert h({k}) == {{'k': [{k}, ({k},), {{{k}}}]}}",
            f"assert set(f([{k}, {k}])) == set([{k}])",
            f"assert keys({{{k}: 1}}) == {{{k}}}",
            "assert f([]) == set() and h(0)['k'][0] == 0",
            f"assert len(f(range({k}))) == {k} and {k} not in f(range({k}))",
        ],
    ),
    "exceptions": lambda k: (
        f"class Odd(ValueError):\n    pass\ndef f(x):\n    if x % 2:\n        raise Odd('odd: %d' % x)\n    return x // 2 + {k}",
        [
            f"assert f(4) == {2 + k}",
            "try:\n    f(3)\n    assert False, 'no exception'\nexcept ValueError:\n    pass",
            "try:\n    f(3)\nexcept Odd as error:\n    said = str(error)\nassert said == 'odd: 3'",
            "raised = False\ntry:\n    f(5)\nexcept Exception:\n    raised = True\nassert raised",
            "import unittest\nwith unittest.TestCase().assertRaises(Odd):\n    f(7)",
            "f(2)",
        ],
    ),
    "in place": lambda k: (
        "def f(x):\n    x.sort()\n    x.append(len(x))\ncalls = []\ndef g(x):\n    calls.append(x)\n    return len(calls)",
        [
            f"x = [3, {k}, 1]\nf(x)\nassert x == {[*sorted([3, k, 1]), 3]}",
            "assert f([]) is None",
            "assert g(1) == 1",
            "assert g(2) == 2",
            "assert calls == [1, 2]",
            f"for i in range({k}):\n    n = g(i)\n    assert n == i + 3",
            f"assert g(0) == {k + 3} and g(0)",
        ],
    ),
    "a check": lambda k: (
        f"def solve(xs):\n    return [x + {k} for x in xs if x]",
        [
            f"def check(candidate):\n    assert candidate([1, 0, 2]) == [{1 + k}, {2 + k}]\n    assert candidate([]) == [], 'empty'\n"
            f"    for i in range(1, 5):\n        assert candidate([i]) == [i + {k}]\n\ncheck(solve)",
            f"METADATA = {{'a': 1}}\n\ndef check(f):\n    given = [{k}, 1]\n    assert f(given) == [{2 * k}, {k + 1}]\n"
            f"    assert given == [{k}, 1]\n\ncheck(solve)",
        ],
    ),
    "a closure": lambda k: (
        "def adder(n):\n    def add(x):\n        return x + n\n    return add\ndef compose(*fs):\n    def run(x):\n"
        "        for f in fs:\n            x = f(x)\n        return x\n    return run",
        [
            f"assert adder({k})(1) == {k + 1}",
            f"assert compose(adder({k}), str)(1) == '{k + 1}'",
            "assert callable(adder(1))",
        ],
    ),
    "an enumeration": lambda k: (
        f"import enum, collections\nclass C(enum.IntEnum):\n    A = {k}\nclass S(str, enum.Enum):\n    X = 'x{k}'\n"
        "Point = collections.namedtuple('Point', 'x y')\nclass Plain(enum.Enum):\n    R = 'r'",
        [
            f"assert C.A == {k}",
            f"assert S.X == 'x{k}'",
            f"assert Point(1, {k}) == (1, {k})",
            "assert Plain('r') is Plain.R and Plain.R == Plain.R",
            "assert Plain.R != 'r'",
            f"assert Point(1, {k})._asdict() == {{'x': 1, 'y': {k}}}",
        ],
    ),
    "bytes and files": lambda k: (
        "import hashlib, struct\ndef f(b):\n    return b[::-1]\ndef g(n):\n    return struct.pack('>H', n)\n"
        "def h(text):\n    with open('note', 'w') as file:\n        file.write(text)\n    return open('note').read()",
        [
            f"assert f(b'ab{k}') == {f'ab{k}'.encode()[::-1]!r}",
            f"assert g({k}) == bytes([0, {k}])",
            f"assert h('n{k}') == 'n{k}'",
        ],
    ),
    "operators of its own": lambda k: (
        "class Bag:\n    def __init__(self, *x):\n        self.x = x\n    def __contains__(self, y):\n        return y in self.x\n"
        "    def __len__(self):\n        return len(self.x)\n    def __iter__(self):\n        return iter(self.x)\n"
        "    def __getitem__(self, i):\n        return self.x[i]\n    def __bool__(self):\n        return bool(self.x)",
        [
            f"b = Bag(1, {k + 1})\nassert {k + 1} in b",
            "assert 0 not in b and b and len(b) == 2",
            f"assert list(b) == [1, {k + 1}] and b[-1] == {k + 1}",
            "assert not Bag()",
            "assert Bag() is not None",
        ],
    ),
    "types": lambda k: (
        "from __future__ import annotations\nfrom typing import Optional\n"
        f"def f(x: Optional[int]) -> list[str]:\n    return [str(x)] * {k}\ndef find(x, y):\n    return x.index(y) if y in x else None",
        [
            f"assert f(1) == {['1'] * k}",
            "assert isinstance(f(1), list) and type(f(1)) == list",
            "assert find([1], 2) is None",
            f"assert find([{k}], {k}) is not None",
            f"assert find([0, {k}], {k}) in (0, 1)",
            "assert f(None) != []",
        ],
    ),
    "large values": lambda k: (
        "import asyncio, random, sys\nsys.setrecursionlimit(5000)\ndef f(n):\n    return list(range(n))\n"
        "async def wait(x):\n    return x\ndef deep(n):\n    return 0 if n == 0 else 1 + deep(n - 1)\n"
        "def shuffled(n):\n    r = random.Random(0)\n    x = list(range(n))\n    r.shuffle(x)\n    return x",
        [
            f"assert f({k * 1000})[-1] == {k * 1000 - 1}",
            f"assert f({k * 100}) == list(range({k * 100}))",
            f"assert sorted(shuffled({k * 9})) == f({k * 9})",
            f"assert set(f({k * 400})) == set(range({k * 400})) and set(f({k * 400})) != set(range({k * 400 + 1}))",
            f"assert deep({k * 300}) == {k * 300}",
            f"assert 2 ** {k * 500} == {2 ** (k * 500)} and f(0) == []",
            f"assert f({k * 100_000}) and not f(0)",
            f"assert len(str(f({k * 2000}))) > 1000",
        ],
    ),
}


def programs(sizes):
    """Of each family one program for each size: (name, program, tests)."""
    return [(f"{name} {size}", *make(size)) for name, make in FAMILIES.items() for size in sizes]
