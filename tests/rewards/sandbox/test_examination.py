import ast
import itertools
import json

import pytest
from hacks import HACKS, TESTS
from right_programs import FAMILIES, programs

from rewards.sandbox import examination, sandbox
from rewards.sandbox.examination import Cheating, Examiner, rebuild
from rewards.sandbox.split_tests import Constants, constants, split
from rewards.texts.code import code

RIGHT = "def double(x):\n    return x * 2"


@pytest.fixture(scope="module")
def reward(protected):
    return code(seconds=5)


def graded(reward, programs, tests):
    count = len(programs)
    return reward(list(programs), [""] * count, [list(each) for each in tests], [True] * count)


def test_no_hack_earns_anything_and_the_right_program_everything(reward):
    scores = graded(reward, [*HACKS.values(), RIGHT], [TESTS] * (len(HACKS) + 1))
    assert {name: score for name, score in zip(HACKS, scores, strict=False) if score} == {}
    assert scores[-1] == 1.0


@pytest.mark.parametrize("sizes", [(9,), pytest.param(range(2, 9), marks=pytest.mark.zoo)], ids=["largest", "smaller"])
def test_right_programs_of_many_kinds_keep_their_score(reward, sizes):
    names, right, tests = zip(*programs(sizes), strict=True)
    assert len(right) == 27 * len(sizes) == len(FAMILIES) * len(sizes)
    scores = graded(reward, right, tests)
    assert {name: score for name, score in zip(names, scores, strict=True) if score != 1} == {}


def test_what_is_expected_never_enters_the_process_of_the_program(reward, monkeypatch):
    sent, write = [], sandbox._Process._write
    monkeypatch.setattr(sandbox._Process, "_write", lambda self, said: sent.append(said) or write(self, said))
    tests = [
        "assert f(1) == 31337",
        "assert 'the answer' == g(2), 'a message'",
        "assert f(1) in (5, 31337) and not g(2) == 31337 or f(3) > 31337",
        "assert abs(f(1) - 31337) < 0.5",
        "for x, y in [(1, 31337)]:\n    assert f(x) == y",
        "def check(candidate):\n    assert candidate(1) == 31337\ncheck(f)",
        "given = f(1)\nwanted = 31337\nassert given == wanted, wanted",
    ]
    program = "def f(x):\n    return 31330 + 7 * x\ndef g(x):\n    return 'the' + ' answer'"
    assert sandbox.run(program, tests).passed == (True,) * len(tests)
    asked = [said[2] for said in sent if isinstance(said, list) and said[1] == "value" and "+" not in said[2]]
    assert asked == ["f(1)", "g(2)", "f(1)", "g(2)", "f(1)", "f(1)", "f(1)", "given"]
    late = next(said for said in sent if "wanted" in str(said))
    assert late[1:] == ["do", "wanted = 31337"]  # after it has been compared with, for tests that come later
    sent.remove(late)
    assert not any(word in str(said) for said in sent for word in ("31337", "the answer", "message", "0.5"))


def test_what_needs_no_program_is_computed_without_it(reward):
    test = (
        "import math as m\nassert f([2, 1]) == sorted([2, 1]) and f(m.pi) == m.floor(m.pi) or f(n for n in (1,)) == x"
    )
    assert constants([split(test)]) == Constants(("import math as m",), ("sorted([2, 1])", "m.floor(m.pi)"))
    lie = "import builtins\nbuiltins.sorted = lambda x: 'yes'\ndef f(x):\n    return 'yes'"
    assert sandbox.run(lie, ["assert f([2, 1]) == sorted([2, 1])"]).passed == (False,)


def yes(denies=lambda source: False):
    """A process that says yes to all, or denies what `denies` tells to."""

    def ask(kind, *sources):
        no = any(map(denies, sources))
        if kind == "do":
            return ["raised", "AssertionError: "] if no else ["done"]
        return ["claim", not no, False] if kind == "claim" else ["value", not no]

    return ask


@pytest.mark.parametrize("test", ["assert f(1)", "assert not f(1)", "assert g(f) and f(1)", "assert 1 < f(1) < x"])
def test_claims_are_put_as_they_are_and_denied_and_affirming_both_is_cheating(test):
    forms = set()

    def ask(kind, source):
        forms.add(source.startswith("not ("))
        return ["claim", True, False]

    for _ in range(64):  # which form comes first is drawn
        taken = split(test)
        passed, claimed = Examiner(ask, {}).passes(taken)
        assert claimed
        if passed:
            with pytest.raises(Cheating, match="as it is and denied"):
                Examiner(ask, {}, second=True).passes(taken, passed_before=True)
    assert forms == {False, True}


def test_a_statement_is_proved_by_one_that_must_fail():
    taken = split("for x in y:\n    assert f(x)")
    assert Examiner(yes(), {}).passes(taken) == (True, True)
    with pytest.raises(Cheating, match="a test passes that cannot"):
        Examiner(yes(), {}, second=True).passes(taken, passed_before=True)
    honest = yes(denies=lambda source: source.splitlines()[-1].startswith("assert"))
    assert Examiner(honest, {}, second=True).passes(taken, passed_before=True) == (True, True)


def test_canaries_find_a_process_that_says_yes_to_all_or_nothing():
    for ask in (yes(), lambda kind, *sources: ["value", sources[0][1:9]] if kind == "value" else ["done"]):
        for _ in range(20):
            with pytest.raises(Cheating):
                Examiner(ask, {}).canary()

    def honest(kind, source):
        try:
            return ["value", eval(source)] if kind == "value" else ["done", exec(source)][:1]
        except AssertionError:
            return ["raised", "AssertionError"]

    for _ in range(20):
        Examiner(honest, {}).canary()


@pytest.mark.parametrize("value", [
    None, True, 7, -1.5, "é\ud800", [1, [2]], (1, (2,)), {1, 2}, {"a": {1: (2,)}}, b"\x00\xff", 1 + 2j, frozenset({(1,)})
])  # fmt: skip
def test_plain_values_travel_unchanged(reward, value):
    assert sandbox.run(f"x = {value!r}", [f"assert x == {value!r}", f"assert x != {value!r}"]).passed == (True, False)


def test_what_stands_for_no_value_is_refused():
    assert f"MOST_HASHED = {examination.MOST_HASHED} " in (sandbox._JAIL / "trial.py").read_text()
    odd = {"set": [*range(1001)]}, {"set": [1], "tuple": []}, {"set": [[1]]}
    for tagged in ({}, {"int": 4}, {"ratio": [1, 0]}, {"complex": "x"}, *odd):
        with pytest.raises((ValueError, TypeError, ArithmeticError)):
            json.loads(json.dumps(tagged), object_hook=rebuild)


def test_loops_and_checks_are_taken_apart_only_where_nothing_changes():
    kept = [
        "for x in ([1],):\n    assert f(x) == x",  # one list, which f may change
        "for x in (1, 2):\n    assert [x for x in f(x)]",
        "for x in y:\n    assert f(x)",
        "for x in (1, 2):\n    y = x\n    assert f(y)",
        "def check(c):\n    return c(1)\ncheck(f)",
        "for x in range(1001):\n    assert f(x)",
    ]
    for test in kept:
        [step] = split(test).steps
        assert step.decides
    conditions = [ast.unparse(step.condition) for step in split("for x in range(1, 6, 2): assert f(x) == x").steps]
    assert conditions == ["f(1) == 1", "f(3) == 3", "f(5) == 5"]


def test_options_of_isclose_that_come_as_one_dictionary_are_no_failure(reward):
    test = 'import math\nassert math.isclose(third(), 0.33, **{"abs_tol": 0.01})'
    assert graded(reward, ["def third():\n    return 1 / 3", "def third():\n    return 1 / 4"], [[test]] * 2) == [1, 0]


def test_a_test_is_asked_for_once_in_a_process_whatever_it_is(reward):
    program = "calls = []\ndef f(x):\n    calls.append(x)\n    return x"
    tests = ["assert f(1) == 1", "assert f(True)", "assert f(2) == f(2)", "f(3)", "for i in f('ab'):\n    assert i"]
    for left, right in itertools.pairwise(tests):
        both = [left, right, "assert len(calls) == " + str(2 + (left.count("f(") > 1) + (right.count("f(") > 1))]
        assert sandbox.run(program, both).passed == (True, True, True)
