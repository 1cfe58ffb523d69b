"""Whether a run computes compiled, if it decides itself: by measured times, alike on all processes, and for good."""

import json
from dataclasses import replace
from functools import partial

import pytest
from field import lines
from in_compiled import SECONDS, begun, timed

from flowgrpo.errors import InputError
from flowgrpo.flow.planning import compile_decision

FASTER = {**SECONDS, True: (0.5, 1.5)}  # of 1 s and 3 s
# 6 iterations of 32 chains of 6 steps in calls of 16 rows. 5 steps are trained, with evaluations of the reference.
UPDATES = 6 * 2 * 5
WITHOUT = 6 * 2 * 6 + UPDATES
EAGER, SAVED = WITHOUT + 3 * UPDATES, WITHOUT / 2 + 1.5 * UPDATES


def decided(run):
    with run.report:
        run.settle()
    return run.policy.compiled.on, json.loads((run.folder / "compile.json").read_text())


@pytest.fixture
def timing(monkeypatch):
    return partial(timed, monkeypatch.setattr)


@pytest.mark.parametrize(("took", "compiled"), [(SAVED - 1, True), (SAVED + 1, False)])
def test_blocks_are_compiled_if_that_saves_more_than_it_takes(tmp_path, timing, took, compiled):
    timing(FASTER, took)
    on, kept = decided(begun(tmp_path))
    assert on == kept["compiled"] == compiled
    times = "a call of a rollout takes 0.5 s in place of 1 s and a call of an update takes 1.5 s in place of 3 s"
    assert kept["why"] == f"{times}, which saves {SAVED:.0f} s of the run's {EAGER:.0f} s; compiling took {took:.0f} s"


def test_what_is_slower_compiled_costs_time(tmp_path, timing):
    timing({**SECONDS, True: (2.0, 3.0)}, 40.0)
    on, kept = decided(begun(tmp_path))
    assert not on
    assert f"which costs {WITHOUT} s of the run's {EAGER} s" in kept["why"]


def test_a_short_run_compiles_nothing(tmp_path, timing, capsys):
    timing(FASTER, 0.0)
    run = begun(tmp_path, train__iterations=1)
    on, kept = decided(run)
    assert (on, run.policy.compiled.switched) == (False, [])
    assert kept["why"] == "all calls of the run take 52 s, and compiling takes about 60 s"
    told = capsys.readouterr()
    assert f"model.compile: eager; {kept['why']}" in " ".join((told.err + told.out).split())


def test_a_run_whose_calls_are_timed_has_the_numbers_of_one_that_asks_for_nothing(tmp_path, timing):
    timing({**SECONDS, True: (2.0, 3.0)}, 40.0)
    runs = []
    for word in ("auto", False):
        runs.append(begun(tmp_path / str(word), model__compile=word))
        runs[-1].run()
    assert lines(runs[0]) == lines(runs[1])
    assert runs[0].policy.compiled.switched == [True, False]


@pytest.mark.parametrize("took", [0.0, 1e6])
def test_a_resumed_run_does_as_it_began(tmp_path, timing, took):
    """Other times would lead to another decision, and other numbers."""
    timing(FASTER, took)
    whole = begun(tmp_path / "whole", train__iterations=4)
    whole.run()
    begun(tmp_path / "half", 4, stops=2)
    timing(FASTER, 1e6 - took)
    rest = begun(tmp_path / "half", train__iterations=4)
    rest.resume()
    assert rest.done == 2
    rest.run()
    assert rest.policy.compiled.on == whole.policy.compiled.on == (took == 0)
    assert lines(rest) == lines(whole)


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("compiler", "PyTorch compiles for cpu with no-compiler, which is not installed here"),
        ("memory", "calls of 16 and 16 rows run out of memory"),
        ("break", "the graph of a block breaks (Unsupported: print)"),
        ("error", "the blocks cannot be compiled (no such operator)"),
    ],
)
def test_what_does_not_compile_stays_eager_and_says_why(tmp_path, timing, monkeypatch, fault, why):
    timing(FASTER, 0.0)
    monkeypatch.setenv("CXX", "no-compiler" if fault == "compiler" else "sh")
    run = begun(tmp_path)
    run.policy.compiled.fault = fault
    on, kept = decided(run)
    assert (on, kept["why"]) == (False, why)


def test_a_run_that_began_compiled_needs_a_compiler(tmp_path, timing, monkeypatch):
    timing(FASTER, 0.0)
    decided(begun(tmp_path))
    monkeypatch.setenv("CXX", "no-compiler")
    with pytest.raises(
        InputError, match=r"^model.compile: PyTorch compiles for cpu with no-compiler.* or begin a run of"
    ):
        decided(begun(tmp_path))


@pytest.mark.parametrize("content", ["[]", "{}", '{"compiled": 1}'])
def test_a_record_of_something_else_is_refused(tmp_path, content):
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / compile_decision.FILE).write_text(content)
    with pytest.raises(InputError, match=r"compile\.json is not what a run writes that decides on model.compile"):
        decided(begun(tmp_path))


def test_the_slowest_process_decides(tmp_path, timing):
    """Its times are longer than those of this one, for which it would pay to compile."""
    timing(FASTER, 0.0)
    run = begun(tmp_path)

    def everyone(value):
        slower = isinstance(value, compile_decision.Times) and run.policy.compiled.on
        return [value, replace(value, update=9.0)] if slower else [value, value]

    run.everyone = everyone
    on, kept = decided(run)
    assert not on
    assert "a call of an update takes 9 s in place of 3 s" in kept["why"]


def test_what_one_process_cannot_do_none_does(tmp_path, timing):
    timing(FASTER, 0.0)
    run = begun(tmp_path)
    failed = "calls of 16 and 16 rows run out of memory"
    run.everyone = lambda value: [value, failed if run.policy.compiled.on else value]
    on, kept = decided(run)
    assert (on, kept["why"]) == (False, failed)
