"""What processes told each other is noted, for work that is made again."""

import pytest

from flowgrpo.training.distributed import replay_journal


def test_work_that_is_made_again_meets_nobody_twice():
    met = []

    def meet(name):
        return replay_journal.told(lambda: met.append(name) or f"told {name}")

    with replay_journal.kept() as notes:
        assert meet("a") == "told a"
        begun = notes.met
        assert meet("b") == "told b"
        notes.met = begun
        assert [meet("b"), meet("c")] == ["told b", "told c"]
    assert met == ["a", "b", "c"]


def test_a_journal_within_another_is_the_same_and_ends_with_it():
    with replay_journal.kept() as outer, replay_journal.kept() as inner:
        assert inner is outer
        assert replay_journal.told(lambda: 1) == 1
    with replay_journal.kept() as another:
        assert another.met == 0
        assert replay_journal.told(lambda: 2) == 2


def fail():
    raise MemoryError


def test_work_that_failed_in_a_meeting_is_final():
    """The other process may be in the middle of it."""
    with replay_journal.kept() as notes:
        with pytest.raises(MemoryError):
            replay_journal.told(fail)
        assert notes.final
    with replay_journal.kept() as another:
        assert not another.final


def test_what_is_taken_once_is_final_where_it_fails():
    with replay_journal.kept() as notes:
        with replay_journal.taken_once():
            pass
        assert not notes.final
        with pytest.raises(MemoryError), replay_journal.taken_once():
            fail()
        assert notes.final
    with pytest.raises(MemoryError), replay_journal.taken_once():  # nothing else happens where no journal is kept
        fail()


def test_without_a_journal_each_meeting_is_made():
    told = iter(range(2))
    assert [replay_journal.told(told.__next__) for _ in range(2)] == [0, 1]
