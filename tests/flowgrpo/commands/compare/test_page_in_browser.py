"""The page that compares runs in a real browser: light and dark, wide and on a phone, by keyboard, with wild words."""

import pytest
from browsing import LOOKS, WILD, opened
from planted import trained_run

from flowgrpo.commands.inspect.gallery import write_gallery


def planted(folder, place, steps, last):
    """A run of three prompts: the last rewards of the first and second are given, the third is in one run only."""
    prompts = ["a red circle", WILD, *(["a blue square"] if place == 0 else [])]
    lines = [
        {
            "prompt": prompt,
            "seed": seed,
            "step": step,
            "shade": 90 + 20 * place * (step > 0) + step,
            "rewards": {"r": last[seed] if step == steps[-1] else 0.5, "s": None},
        }
        for seed, prompt in enumerate(prompts)
        for step in steps
    ]
    evaluated = {
        step: {"reward/mean": (step + place) / 10, "reward/r/mean": 0.5, "reward/s/mean": 0.1} for step in steps
    }
    rewards = [{"use": f"./m.py:{name}", "name": None, "weight": 1.0, "offset": 0.0, "options": {}} for name in "rs"]
    config = {"rewards": rewards, "model": {"note": WILD if place else "plain"}, "train": {"groups": place}}
    return trained_run(folder / f"run {place}", lines, evaluated, config=config, environment={"device": f"gpu {place}"})


@pytest.fixture(scope="module")
def page_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compared")
    few = [planted(folder, 0, (0, 2, 4), (0.5, 0.75, 0.9)), planted(folder, 1, (0, 3), (0.5, 0.25))]
    return write_gallery(few, folder / "few.html")


@pytest.fixture(scope="module")
def page_of_many(tmp_path_factory):
    """Of eight runs: all colours, and two of them again."""
    folder = tmp_path_factory.mktemp("many")
    runs = [planted(folder, place, (0, 2), (place / 10, 0.5, 0.5)) for place in range(8)]
    return write_gallery(runs, folder / "many.html")


@pytest.mark.parametrize(("width", "scheme"), LOOKS)
@pytest.mark.parametrize("which", ["page_file", "page_of_many"])
def test_the_page_is_quiet_legible_and_not_wider_than_its_window(browser, request, check_look, which, width, scheme):
    with opened(browser, request.getfixturevalue(which), width, scheme) as page:
        page.locator("details").evaluate_all("all => all.forEach(each => each.open = true)")
        check_look(page)
        assert page.locator("script[src], link").count() == 0


def test_arrow_keys_choose_what_curves_are_drawn_over(browser, page_file):
    with opened(browser, page_file) as page:
        page.locator("input[value=step]").focus()
        seen = []
        for _ in range(3):
            titles = page.locator("header .by:visible circle.c1 title").all_text_contents()
            seen.append((titles[-1], page.locator(".parts .by:visible").count()))
            page.keyboard.press("ArrowRight")
        assert seen == [("B, step 3: 0.400", 2), ("B, 300 evaluations: 0.400", 2), ("B, 8 seconds: 0.400", 2)]
        assert page.told == []


def test_the_slider_shows_of_each_run_the_latest_sample_by_a_step(browser, page_file):
    def told():
        words = page.locator("figure").first.locator(".run").all_inner_texts()
        return [word.split()[:3] for word in words]

    with opened(browser, page_file) as page:
        assert told() == [["A", "step", "4"], ["B", "step", "3"]]
        page.locator(".scrub").focus()
        page.keyboard.press("ArrowLeft")
        assert page.locator("nav output").inner_text() == "3"
        assert told() == [["A", "step", "2"], ["B", "step", "3"]]
        page.keyboard.press("Home")
        assert told() == [["A", "step", "2"], ["B", "step", "0"]]
        assert page.told == []


def test_the_order_is_by_disagreement_or_change(browser, page_file):
    """Last rewards are 0.5 and 0.5; 0.75 and 0.25; 0.9 of one run alone: its change of 0.4 is the largest."""

    def order():
        return page.locator("figure").evaluate_all("all => all.map(each => +each.dataset.place)")

    with opened(browser, page_file) as page:
        seen = {}
        for name in ("disagreement", "change", "place"):
            page.locator(".order").select_option(name)
            seen[name] = order()
        assert seen == {"disagreement": [1, 0, 2], "change": [2, 1, 0], "place": [0, 1, 2]}
        assert page.told == []


def test_pictures_are_enlarged_and_settings_opened_by_keyboard(browser, page_file):
    with opened(browser, page_file) as page:
        page.locator(".picture:visible").first.focus()
        page.keyboard.press("Enter")
        assert page.locator("dialog[open] img").count() == 3  # before, A, B
        page.keyboard.press("Escape")
        assert page.locator("dialog[open]").count() == 0
        page.locator("summary").first.focus()
        was = page.locator(".wide:visible").count()
        page.keyboard.press("Enter")
        assert abs(page.locator(".wide:visible").count() - was) == 1
        assert page.told == []


@pytest.mark.parametrize("width", [390, 1300])
def test_names_and_numbers_of_rewards_fit_their_column(browser, tmp_path, width):
    before = {"prompt": "cat", "seed": 0, "step": 0, "shade": 9, "rewards": {"redness": -0.0123, "pick_score": 0.0}}
    after = {**before, "step": 2, "rewards": {"redness": -0.00246, "pick_score": 123.4}}
    runs = [trained_run(tmp_path / name, [before, after], {}) for name in "ab"]
    with opened(browser, write_gallery(runs, tmp_path / "page.html"), width) as page:
        heights = page.locator(".rewards th").evaluate_all("all => all.map(each => each.clientHeight)")
        assert max(heights) < 2 * min(heights) < 50
        beyond = """all => all.filter(each => each.getBoundingClientRect().right
            > each.closest(".column").getBoundingClientRect().right + 1).length"""
        assert page.locator(".rewards td").count() == 2 + 2 * 4
        assert page.locator(".rewards td").evaluate_all(beyond) == 0


def test_words_of_others_are_shown_as_they_are(browser, page_file):
    with opened(browser, page_file) as page:
        assert page.locator("figcaption").nth(1).inner_text() == WILD
        assert WILD in page.locator(".value").all_inner_texts()
        assert page.locator("figure").nth(2).locator(".lacking:visible").inner_text() == "not in B"
        assert page.locator("img[src=x]").count() == 0
