"""Commands that end well or are refused, and a real browser for the tests of pages."""

import json

import pytest
from browsing import CHROMIUM, CONTRAST, MISSING, QUIET

from flowgrpo.cli import main


@pytest.fixture
def refused(capsys):
    """Gives the one sentence of a command that ends with status 2."""

    def sentence(*words):
        capsys.readouterr()
        assert main([str(word) for word in words]) == 2
        said = capsys.readouterr().err
        assert said.startswith("flowgrpo: ")
        assert said.count("\n") == 1
        return said.removeprefix("flowgrpo: ").removesuffix("\n")

    return sentence


@pytest.fixture
def printed(capsys):
    """Gives what a command that ends well prints; of `--format json` the document."""

    def output(*words):
        capsys.readouterr()
        assert main([str(word) for word in words]) == 0
        out = capsys.readouterr().out
        return json.loads(out) if words[-2:] == ("--format", "json") else out

    return output


@pytest.fixture(scope="module")
def browser():
    """Chromium; without it, or without Playwright, the test is skipped with a sentence."""
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="pip install playwright, to open the pages in a browser"
    )
    if CHROMIUM is None:
        pytest.skip(MISSING)
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(QUIET))
        yield browser
        browser.close()


@pytest.fixture
def check_look():
    """Checks that a page is legible, not wider than its window and silent on the console."""

    def check(page):
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        ratio, whose = page.evaluate(CONTRAST)
        assert ratio >= 4.5, whose
        assert page.told == []

    return check
