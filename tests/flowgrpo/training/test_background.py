import threading

import pytest

from flowgrpo.training.background import Background


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


def test_an_error_reaches_who_waits_and_later_jobs_are_not_run():
    may, done = threading.Event(), []
    with Background() as background:
        background.submit(lambda: may.wait(60) and failing())
        background.submit(lambda: done.append("after"))
        may.set()
        with pytest.raises(OSError, match="No space left"):
            background.wait()
    assert done == []


def test_an_error_reaches_who_gives_a_later_job():
    failed = threading.Event()
    with pytest.raises(OSError, match="No space left"), Background() as background:  # noqa: PT012
        background.submit(failing)
        background.submit(failed.set)  # not run, but looked at
        while True:
            background.submit(failed.set)
    assert not failed.is_set()


def test_an_error_is_not_lost_where_nobody_waits():
    with pytest.raises(OSError, match="No space left"), Background() as background:
        background.submit(failing)


def test_an_error_on_its_way_goes_first(caplog):
    with pytest.raises(ValueError, match="mine"), Background() as background:  # noqa: PT012
        background.submit(failing)
        raise ValueError("mine")
    assert "failed, too: OSError: [Errno 28] No space left on device" in caplog.text
