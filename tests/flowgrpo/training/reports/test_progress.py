"""What is shown of the phases, by a clock that stands still until it is moved."""

import io

import pytest
from accelerate import Accelerator
from rich.console import Console

from flowgrpo.training.reports import progress
from flowgrpo.training.reports.progress import Display, duration, open_display
from flowgrpo.training.reports.report import Report
from flowgrpo.training.run import phases
from flowgrpo.training.run.phases import phase


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(phases, "clock", clock)
    return clock


@pytest.fixture
def display(clock):
    """One that is told of the phases and has no thread; `lines` are what it printed."""
    display = Display(Console(file=io.StringIO(), width=200))
    with phases.watch(display.changed):
        yield display


def lines(display):
    return display.console.file.getvalue().splitlines()


def test_a_phase_that_counts_says_how_far_it_is_and_how_long_it_will_take(clock, display):
    with phase("encoding", 512) as encoding:
        assert display.line() == "encoding 0/512"
        clock.now += 37
        encoding.advance(37)
        assert display.line() == "encoding 37/512, 7:55 left"  # a second each
        encoding.advance(1000)
        assert display.line() == "encoding 512/512, 0:00 left"
    assert display.line() == ""


def test_the_outermost_phase_that_counts_is_shown_or_the_innermost(clock, display):
    with phase("loading"):
        assert display.line() == "loading"
        clock.now += 65
        assert display.line() == "loading 1:05"
        with phase("encoding", 4):
            assert display.line() == "encoding 0/4"
        with phase("trial"):
            assert display.line() == "trial"
    with phase("evaluating", 8), phase("rewards"):
        assert display.line() == "evaluating 0/8"


def test_what_a_run_says_stands_around_its_phase(clock, display):
    display.step, display.numbers, display.left = "step 3/20", "reward 0.500", lambda: 3700.0
    with phase("rollout"):
        assert display.line() == "step 3/20  rollout  reward 0.500  ETA 1:01:40"


def test_a_run_that_goes_on_ends_when_it_would_at_its_pace_so_far(clock, tmp_path):
    report = Report(tmp_path, Accelerator(cpu=True), 10)
    report.lines = [{"time/eval": 10.0}, {"time/rollout": 20.0, "time/reward": 5.0, "time/update": 10.0}]
    with report:
        report.start(1)
        assert report.display.left() == 9 * 40.0
        clock.now += 60
        assert report.display.left() == 300.0


def test_where_there_is_no_terminal_a_line_is_printed_at_most_every_half_minute(clock, display):
    with phase("loading"):
        clock.now += 29
        display.tell()
        clock.now += 1
        display.tell()
    with phase("encoding", 10) as encoding:
        for _ in range(10):
            clock.now += 7
            encoding.advance()
    with phase("update"):
        clock.now += 31
        display.tell()  # as its thread does
        display.tell()
    assert lines(display) == ["loading 0:30", "encoding 5/10, 0:35 left", "encoding 10/10, 0:00 left", "update 0:31"]
    assert not any(ord(letter) < 32 for line in lines(display) for letter in line)


def test_a_first_line_may_come_earlier_than_the_others(clock):
    display = Display(Console(file=io.StringIO(), width=200), first=3)
    with phases.watch(display.changed), phase("planning"):
        for _ in range(40):
            clock.now += 1
            display.tell()
    assert lines(display) == ["planning 0:03", "planning 0:33"]


def test_what_comes_first_waits_in_a_log_for_what_comes_next_which_counts_as_a_line(clock, display):
    display.begin("run      runs/demo")
    assert lines(display) == []
    display.print("step 0: held-out reward 0.500")
    with phase("rollout"):
        clock.now += 20
        display.tell()
    display.print("step 1")
    assert lines(display) == ["run      runs/demo", "step 0: held-out reward 0.500", "step 1"]
    terminal = Display(Console(file=io.StringIO(), width=60, force_terminal=True))
    terminal.begin("run      runs/demo")
    assert lines(terminal) == ["run      runs/demo"]


def test_a_thread_tells_where_a_long_phase_is(monkeypatch):
    display = Display(Console(file=io.StringIO(), width=200), every=0.05)
    with display, phase("update"):
        for _ in range(200):
            if lines(display):
                break
            display._closed.wait(0.05)
    assert lines(display)[0].startswith("update")


def test_a_terminal_has_one_live_line_that_leaves_nothing_behind(clock):
    console = Console(file=io.StringIO(), width=60, force_terminal=True)
    with Display(console) as display, phases.watch(display.changed):
        with phase("loading"), phase("trial"):
            pass
        with phase("encoding", 3) as encoding:
            clock.now += 2
            encoding.advance()
            display._live.refresh()
    told = console.file.getvalue()
    assert told.startswith("loading\n")  # a download may show a bar below it
    assert "encoding 1/3, 0:04 left" in told
    assert told.rstrip("\r\n").endswith("\x1b[2K")  # the line is cleared
    assert display._live is None


def test_only_the_main_process_speaks(capsys):
    with open_display(main=False) as display, phase("loading"):
        display.print("run")
        assert shown_again() is display
    assert capsys.readouterr().err == ""


def shown_again():
    with open_display() as display:
        return display


@pytest.mark.parametrize(("seconds", "words"), [(0, "0:00"), (65.9, "1:05"), (3600, "1:00:00"), (-3, "0:00")])
def test_durations(seconds, words):
    assert duration(seconds) == words


def test_nothing_is_left_open_by_an_error(display):
    with pytest.raises(ZeroDivisionError), phase("update"):
        1 / 0  # noqa: B018
    assert phases.current_phase() is None
    assert progress._shown == []
