"""A real browser for the tests of pages."""

import pytest
from browsing import CHROMIUM, MISSING, QUIET


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
