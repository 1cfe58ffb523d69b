"""The report in a real browser: light and dark, wide and on a phone, by keyboard, with what a prompt may hold."""

import json

import pytest
import torch
from browsing import CONTRAST, LOOKS, opened
from planted_run import CONFIG, LINES, WILD, run_of, use, with_samples, with_trees, written

from flowgrpo.commands.report import write_report
from flowgrpo.training.reports.samples import Text, save_sample


def wild(folder):
    """A run whose names, prompts and warnings are markup of 4,000 letters."""
    config = {**CONFIG, "eval_rewards": [{**use("a"), "name": WILD}], "model": {**CONFIG["model"], "path": WILD}}
    lines = [{**line, f"reward/{WILD}/mean": 0.5 + line["step"]} for line in LINES]
    run = run_of(folder, lines, config=config, warnings=[WILD] * 60)
    return with_trees(with_samples(run, [0.1, 0.2, 0.3, 0.4], prompts=[WILD, "a cat", "a dog", "a fox"]))


def answered(folder, decoded):
    """A run that keeps one sample that is no picture."""
    run = run_of(folder)
    (run / "samples").mkdir()
    file = save_sample(decoded, run / "samples/one").name
    lines = [{"file": file, "prompt": WILD, "seed": 0, "step": 2, "rewards": {"mine": 0.5}}]
    (run / "samples/manifest.jsonl").write_text(written(lines))
    return run


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    text = Text(f"a <i>b</i> {WILD}", ["a", " ", "<i>b</i>", WILD[:40], "<eos>", "<eos>"], [0, 1, 2, -1, 3, 3])
    runs = {
        "run": with_trees(with_samples(run_of(folder / "run", warnings=["12:00 late"]), [0.1, 0.2, 0.3, 0.4])),
        "wild": wild(folder / "wild"),
        "text": answered(folder / "text", text),
        "sound": answered(folder / "sound", torch.linspace(-1, 1, 4000)[None]),
        "begun": run_of(folder / "begun", []),
    }
    return {name: write_report(run, folder / f"{name}.html") for name, run in runs.items()}


@pytest.mark.parametrize(("width", "scheme"), LOOKS)
@pytest.mark.parametrize("name", ["run", "wild", "text", "sound", "begun"])
def test_a_page_is_quiet_legible_and_not_wider_than_its_window(browser, pages, check_look, name, width, scheme):
    with opened(browser, pages[name], width, scheme) as page:
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        page.evaluate("for (const each of document.querySelectorAll('details')) each.open = true")
        check_look(page)
        assert page.locator("script, link").count() == 0


def test_what_can_be_opened_or_scrolled_is_reached_by_keyboard(browser, pages):
    with opened(browser, pages["run"]) as page:
        reached = []
        for _ in range(6):
            page.keyboard.press("Tab")
            reached.append(page.evaluate("[document.activeElement.tagName, document.activeElement.ariaLabel]"))
            if reached[-1][0] == "SUMMARY":
                page.keyboard.press("Enter")
        assert reached == [
            ["SUMMARY", None],
            ["DIV", "evaluations"],
            ["DIV", "watched rewards"],
            ["DIV", "cost"],
            ["SUMMARY", None],
            ["PRE", None],
        ]
        assert page.locator("#curves table").is_visible()
        assert "preset: flow_grpo" in page.locator("#asked pre").inner_text()
        outline = page.locator("#asked pre").evaluate("element => getComputedStyle(element).outlineStyle")
        assert outline == "solid"


def test_charts_and_bars_are_drawn_and_named(browser, pages):
    with opened(browser, pages["run"]) as page:
        labels = page.locator("svg").evaluate_all("all => all.map(each => each.getAttribute('aria-label'))")
        assert labels[:3] == ["reward by training step", "mine by iteration", "watched by iteration"]
        assert "gradient norm by iteration" in labels
        assert labels[-1] == "standard deviation by step"
        for shape in page.locator("polygon.band, rect.bar").all():
            box = shape.bounding_box()
            assert box["width"] > 10
            assert box["height"] > 10


def test_on_paper_it_is_black_on_white_without_what_plays(browser, pages):
    with opened(browser, pages["sound"], scheme="dark") as page:
        page.emulate_media(media="print", color_scheme="dark")
        look = page.evaluate(
            "(({ backgroundColor, color }) => [backgroundColor, color])(getComputedStyle(document.body))"
        )
        assert look == ["rgb(255, 255, 255)", "rgb(0, 0, 0)"]
        assert not page.locator("audio").is_visible()
        assert page.locator("svg.sound").is_visible()
        assert page.evaluate(CONTRAST)[0] >= 4.5


def test_what_others_wrote_is_shown_as_they_wrote_it(browser, pages):
    with opened(browser, pages["wild"]) as page:
        assert page.locator("figcaption", has_text="<img src=x onerror=alert(1)></script>").count() == 1
        assert page.locator("img[src=x]").count() == 0
        assert page.locator("#warnings pre").inner_text().count("alert(2)") == 50
        assert json.loads(page.evaluate("JSON.stringify(document.title)")) == "wild · flowgrpo report"
