"""A module that is imported at its first use, without a search for garbage."""

import gc
import sys

import pytest

from flowgrpo.schema.lazy import lazy

MADE = """
import gc
ENABLED = gc.isenabled()
KEPT = [[] for _ in range(5000)]
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "imported_late.py").write_text(MADE)
    (tmp_path / "broken_late.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield lazy("imported_late")
    sys.modules.pop("imported_late", None)


@pytest.fixture
def thawed():
    """Nothing is put aside, as in a new process."""
    gc.unfreeze()
    yield
    gc.freeze()


def young():
    return {id(each) for generation in (0, 1) for each in gc.get_objects(generation)}


def test_an_import_waits_for_its_first_use_and_for_no_garbage(module, thawed):
    assert "imported_late" not in sys.modules
    assert module.ENABLED is False
    assert gc.isenabled()
    assert not young() & set(map(id, module.KEPT))
    assert gc.get_freeze_count() == 0


def test_what_was_put_aside_stays_so(module, thawed):
    gc.freeze()
    count = gc.get_freeze_count()
    assert module.ENABLED is False
    assert gc.isenabled()
    assert gc.get_freeze_count() > count / 2  # some of them may have ended meanwhile


def test_who_looks_for_no_garbage_goes_on_so(module):
    gc.disable()
    try:
        assert module.ENABLED is False
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_broken_module_leaves_collections_as_they_were(module):
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            lazy("broken_late").anything  # noqa: B018
        assert gc.isenabled()
