"""What processes told each other is noted, for work that is made again."""

import pytest

from flowgrpo.training import journal


def test_work_that_is_made_again_meets_nobody_twice():
    met = []

    def meet(name):
        return journal.told(lambda: met.append(name) or f"told {name}")

    with journal.kept() as notes:
        assert meet("a") == "told a"
        begun = notes.met
        assert meet("b") == "told b"
        notes.met = begun
        assert [meet("b"), meet("c")] == ["told b", "told c"]
    assert met == ["a", "b", "c"]


def test_a_journal_within_another_is_the_same_and_ends_with_it():
    with journal.kept() as outer, journal.kept() as inner:
        assert inner is outer
        assert journal.told(lambda: 1) == 1
    with journal.kept() as another:
        assert another.met == 0
        assert journal.told(lambda: 2) == 2


def test_a_meeting_that_failed_is_not_noted():
    with journal.kept() as notes:
        with pytest.raises(OSError, match="nobody"):
            journal.told(lambda: (_ for _ in ()).throw(OSError("nobody")))
        notes.met = 0
        assert journal.told(lambda: 3) == 3


def test_without_a_journal_each_meeting_is_made():
    told = iter(range(2))
    assert [journal.told(told.__next__) for _ in range(2)] == [0, 1]
