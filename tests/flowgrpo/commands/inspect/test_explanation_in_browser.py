"""The page of one sample in a real browser: light and dark, wide and on a phone, by keyboard."""

import pytest
from browsing import LOOKS, WILD, opened
from planted_explanation import SEVERAL, explained


@pytest.fixture(scope="module")
def page_file(tmp_path_factory):
    file = tmp_path_factory.mktemp("explained") / "explain.html"
    file.write_text(explained(*SEVERAL, prompt=WILD).page())
    return file


@pytest.mark.parametrize(("width", "scheme"), LOOKS)
def test_the_page_is_quiet_legible_and_not_wider_than_its_window(browser, page_file, check_look, width, scheme):
    with opened(browser, page_file, width, scheme) as page:
        check_look(page)
        assert page.locator("script[src], link").count() == 0


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
        assert page.locator("dialog[open] p").inner_text() == "other noise in step 0, reward 0.200"
        page.keyboard.press("Escape")
        assert page.locator("dialog[open]").count() == 0
        assert strip.locator("[tabindex='0']").count() == 1
        assert page.told == []


def test_steps_are_ordered_by_what_decides(browser, page_file):
    with opened(browser, page_file) as page:
        for order, steps in ((None, "012"), ("share", "021"), ("spread", "012"), ("place", "012")):
            if order is not None:
                page.locator("#order").select_option(order)
            assert page.locator(".step h3").all_inner_texts() == [f"step {step}" for step in steps]
        assert page.told == []
