"""The page of one sample in a real browser: light and dark, wide and on a phone, by keyboard."""

import pytest
from browsing import CONTRAST, LOOKS, WILD, opened
from planted_explanation import SEVERAL, explained


@pytest.fixture(scope="module")
def page_file(tmp_path_factory):
    file = tmp_path_factory.mktemp("explained") / "explain.html"
    file.write_text(explained(*SEVERAL, prompt=WILD).page())
    return file


@pytest.mark.parametrize(("width", "scheme"), LOOKS)
def test_the_page_is_quiet_legible_and_not_wider_than_its_window(browser, page_file, width, scheme):
    with opened(browser, page_file, width, scheme) as page:
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        ratio, whose = page.evaluate(CONTRAST)
        assert ratio >= 4.5, whose
        assert page.locator("script[src], link").count() == 0
        assert page.told == []


def test_arrow_keys_walk_a_strip_and_enter_enlarges(browser, page_file):
    with opened(browser, page_file) as page:
        strip = page.locator(".strip").first
        strip.locator(".own").focus()
        page.keyboard.press("ArrowRight")
        assert "reward 0.900" in page.evaluate("document.activeElement.getAttribute('aria-label')")
        page.keyboard.press("ArrowRight")  # there is none beyond the best
        page.keyboard.press("Home")
        assert "reward 0.200" in page.evaluate("document.activeElement.getAttribute('aria-label')")
        page.keyboard.press("Enter")
        assert page.locator("dialog[open] p").inner_text() == "other noise in step 1, reward 0.200"
        page.keyboard.press("Escape")
        assert page.locator("dialog[open]").count() == 0
        assert strip.locator("[tabindex='0']").count() == 1
        assert page.told == []


def test_steps_are_ordered_by_what_decides(browser, page_file):
    with opened(browser, page_file) as page:
        heads = lambda: page.locator(".step h3").all_inner_texts()  # noqa: E731
        assert heads() == ["step 1", "step 2", "step 3"]
        page.locator("#order").select_option("share")
        assert heads() == ["step 1", "step 3", "step 2"]
        page.locator("#order").select_option("spread")
        assert heads() == ["step 1", "step 2", "step 3"]
        page.locator("#order").select_option("place")
        assert heads() == ["step 1", "step 2", "step 3"]
        assert page.told == []
