import threading

import pytest

from flowgrpo.training.run.background import Background


def failing():
    raise OSError(28, "No space left on device")


def test_jobs_run_beside_their_giver_in_their_order():
    may, done = threading.Event(), []
    with Background() as background:
        background.submit(lambda: (may.wait(60), done.append("first")))
        background.submit(lambda: done.append(threading.current_thread() is not threading.main_thread()))
        assert done == []
        may.set()
        background.wait()
        assert done == ["first", True]
        background.submit(lambda: done.append("last"))
    assert done == ["first", True, "last"]


def test_who_waits_for_one_job_waits_for_no_later_one():
    may, done = threading.Event(), []
    with Background() as background:
        first = background.submit(lambda: done.append("first"))
        background.submit(lambda: (may.wait(60), done.append("second")))
        background.wait(first)
        assert done == ["first"]
        may.set()
    assert done == ["first", "second"]


def test_an_error_reaches_everyone_who_asks_and_costs_no_other_job():
    may, done = threading.Event(), []
    with pytest.raises(OSError, match="No space left"), Background() as background:  # noqa: PT012
        background.submit(lambda: may.wait(60) and failing())
        background.submit(lambda: done.append("after"))
        may.set()
        for ask in (background.wait, background.wait, lambda: background.submit(done.clear)):
            with pytest.raises(OSError, match="No space left"):
                ask()
    assert done == ["after"]


def test_an_error_is_not_lost_where_nobody_waits():
    with pytest.raises(OSError, match="No space left"), Background() as background:
        background.submit(failing)


def test_an_error_on_its_way_goes_first(caplog):
    with pytest.raises(ValueError, match="mine"), Background() as background:  # noqa: PT012
        background.submit(failing)
        raise ValueError("mine")
    assert "failed, too: OSError: [Errno 28] No space left on device" in caplog.text


def test_an_interruption_at_once_leaves_out_what_has_not_begun():
    may, done = threading.Event(), []
    with pytest.raises(KeyboardInterrupt), Background() as background:  # noqa: PT012
        background.submit(lambda: may.wait(60))
        left_out = background.submit(lambda: done.append("later"))
        raise KeyboardInterrupt
    assert left_out.cancelled()
    may.set()
    assert done == []
