"""The figures of docs/: the committed files are what the script draws, and they stand for light and dark pages."""

import runpy
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FIGURES = ("loop.svg", "trees_kinds.svg", "league.svg")


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    folder = tmp_path_factory.mktemp("figures")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["make_figures.py", str(folder)])
        runpy.run_path(str(ROOT / "scripts/make_figures.py"), run_name="__main__")
    return folder


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_is_what_the_script_draws(drawn, name):
    text = (drawn / name).read_text()
    assert (ROOT / "docs/figures" / name).read_text() == text, "run python scripts/make_figures.py"
    assert "prefers-color-scheme: dark" in text
    ElementTree.fromstring(text)


def test_a_tree_has_as_many_decoded_samples_as_its_plan(drawn):
    text = (drawn / "trees_kinds.svg").read_text()
    # chain, window, lines of two brushes, leaves of two branches, an end with 9 twigs, children, and the legend's
    assert text.count('class="decoded"') == 1 + 1 + 9 + 9 + 8 + 8 + 10 + 4 + 1
