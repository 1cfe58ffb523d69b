"""The pages in a real browser: light and dark, wide and on a phone, with what a prompt may hold."""

import pytest
from browsing import LOOKS, opened
from planted_evaluation import FIRST, SECOND, planted

from flowgrpo.commands.evaluations.page import write_page


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    one = planted(folder / "a", FIRST, rewards=("questions", "jpeg_size"))
    return {"one": write_page([one]), "two": write_page([one, planted(folder / "b", SECOND, "a longer name")])}


@pytest.mark.parametrize(("width", "scheme"), LOOKS)
@pytest.mark.parametrize("name", ["one", "two"])
def test_a_page_is_quiet_legible_and_not_wider_than_its_window(browser, pages, check_look, name, width, scheme):
    with opened(browser, pages[name], width, scheme) as page:
        check_look(page)
        assert page.locator("script[src], link").count() == 0


def test_a_category_leads_to_its_samples_and_a_picture_to_a_larger_one(browser, pages):
    with opened(browser, pages["one"]) as page:
        page.get_by_role("link", name="B", exact=True).click()
        assert page.evaluate("decodeURIComponent(location.hash)") == "#s-B"
        assert page.locator("#s-B").is_visible()
        page.locator("#s-A .picture").first.click()
        assert page.locator("dialog[open] img").count() == 1
