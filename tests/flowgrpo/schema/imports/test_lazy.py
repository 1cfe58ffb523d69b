"""A module that is imported at its first use."""

import sys

import pytest

from flowgrpo.schema.imports.lazy import lazy


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "imported_late.py").write_text("NUMBER = 3\n")
    (tmp_path / "broken_late.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield lazy("imported_late")
    sys.modules.pop("imported_late", None)


def test_an_import_waits_for_its_first_use(module):
    assert "imported_late" not in sys.modules
    assert module.NUMBER == 3
    assert "imported_late" in sys.modules


def test_a_broken_module_is_tried_again():
    for _ in range(2):
        with pytest.raises(ModuleNotFoundError):
            lazy("no_such_module_anywhere").anything  # noqa: B018


def test_a_module_that_fails_says_how(module):
    with pytest.raises(ZeroDivisionError):
        lazy("broken_late").anything  # noqa: B018
