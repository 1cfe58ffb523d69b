"""The page that follows a run, in a real browser: it refreshes itself, and leaves who reads it where they were."""

import json

import pytest
from browsing import CONTRAST, opened
from planted_run import LINES, evaluated, run_of, trained, with_samples, written
from watching import watching

sync_api = pytest.importorskip("playwright.sync_api", reason="pip install playwright, to open the pages in a browser")


def append(run, line):
    with (run / "metrics.jsonl").open("a") as metrics:
        metrics.write(json.dumps(line) + "\n")


def test_it_follows_a_run_from_before_its_first_iteration(browser, tmp_path):
    run = run_of(tmp_path / "r", [])
    with watching(run) as url, opened(browser, url) as page:
        head = page.locator("#head")
        sync_api.expect(head).to_contain_text("no iteration yet")
        sync_api.expect(page.locator("#live")).to_contain_text("last change")
        for line in LINES:
            append(run, line)
        sync_api.expect(head).to_contain_text("iteration 2 of 4")
        sections = "head curves watched signals spectrum cost asked warnings"
        assert page.locator("section").evaluate_all("all => all.map(each => each.id)") == sections.split()
        with_samples(run, [0.1, 0.2])
        sync_api.expect(page.locator("figure img")).to_have_count(2)
        assert page.evaluate("[...document.images].every(image => image.naturalWidth > 0)")
        (run / "metrics.jsonl").write_text(written(LINES[:1]))  # as a resume from the start does
        sync_api.expect(head).to_contain_text("no iteration yet")
        sync_api.expect(page.locator("#signals")).to_have_count(0)
        assert page.told == []


def test_who_reads_stays_where_they_were(browser, tmp_path):
    run = with_samples(run_of(tmp_path / "r", warnings=[f"warning {i}" for i in range(200)]), [0.1, 0.2])
    with watching(run) as url, opened(browser, url) as page:
        page.locator("#curves summary").click()
        page.locator("#warnings pre").focus()
        page.evaluate("document.querySelector('#warnings pre').scrollTop = 120")
        page.evaluate("document.querySelector('#asked').scrollIntoView()")
        place = "document.querySelector('#asked').getBoundingClientRect().top"
        before = page.evaluate(place)
        assert page.evaluate("scrollY") > 500
        page.evaluate("document.querySelector('#asked').mine = true")
        append(run, trained(3, 0.6, **{"policy/kl": 0.1}))
        append(run, trained(4, 0.7, **{"policy/kl": 0.2}))
        append(run, evaluated(4, 0.6, 0.3))
        with (run / "log.txt").open("a") as log:
            log.write("warning 200\n")
        sync_api.expect(page.locator("#warnings")).to_contain_text("201 in log.txt")
        sync_api.expect(page.locator("#signals")).to_contain_text("KL 0.200 now")  # a chart more above
        assert page.evaluate(place) == pytest.approx(before, abs=2)
        assert page.evaluate("document.activeElement.tagName") == "PRE"
        assert page.evaluate("document.querySelector('#warnings pre').scrollTop") == 120
        assert page.locator("#curves details").get_attribute("open") is not None
        assert page.evaluate("document.querySelector('#asked').mine")  # what did not change is the same element
        assert page.told == []


def test_it_says_that_the_server_is_gone_and_goes_on_with_the_next(browser, tmp_path):
    run = run_of(tmp_path / "r")
    with watching(run) as url:
        context = opened(browser, url)
        page = context.__enter__()
        sync_api.expect(page.locator("#live b")).to_have_text("live")
    try:
        sync_api.expect(page.locator("#live b")).to_have_text("connection lost")
        assert page.evaluate(CONTRAST)[0] >= 4.5
        append(run, trained(3, 0.6))
        with watching(run, port=url.rstrip("/").rpartition(":")[2]):
            sync_api.expect(page.locator("#head")).to_contain_text("iteration 3 of 4", timeout=30_000)
            sync_api.expect(page.locator("#live b")).to_have_text("live")
    finally:
        context.__exit__(None, None, None)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_on_a_phone_it_is_legible_and_not_wider(browser, tmp_path, check_look, scheme):
    run = with_samples(run_of(tmp_path / "r"), [0.1, 0.2])
    with watching(run) as url, opened(browser, url, 390, scheme) as page:
        sync_api.expect(page.locator("#live")).to_contain_text("last change")
        check_look(page)
