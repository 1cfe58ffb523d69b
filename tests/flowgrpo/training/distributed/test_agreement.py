import pytest
from in_checkpoints import failing
from pair import pair

from flowgrpo.training.distributed import agreement


def test_what_fails_on_one_fails_on_all_and_the_next_job_goes_on(tmp_path):
    zero, one = pair(failing, tmp_path)
    assert one == ("ZeroDivisionError: no", [1, 2])
    assert zero == ("RuntimeError: ZeroDivisionError: no", [1, 2])


def test_one_alone_asks_nobody():
    alone = agreement.of_first(1)
    assert alone.first
    assert alone.together(lambda: 3) == [3]
    with pytest.raises(OSError, match="full"):
        alone.together(lambda: (_ for _ in ()).throw(OSError("full")))
