"""The page that asks for votes in a real browser: by keyboard, light and dark, wide and on a phone."""

import json
import threading

import pytest
import uvicorn
from browsing import CONTRAST, LOOKS, WILD
from PIL import Image

from flowgrpo.commands.inspect.vote import Ballot, application, pairs_of
from rewards.served import guard

sync_api = pytest.importorskip("playwright.sync_api", reason="pip install playwright, to open the pages in a browser")


@pytest.fixture
def served(tmp_path):
    lines = []
    for number in range(3):
        Image.new("RGB", (8, 8), (80 * number, 0, 0)).save(tmp_path / f"{number}.png")
        lines.append({"file": f"{number}.png", "prompt": WILD})
    (tmp_path / "manifest.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    ballot = Ballot(pairs_of([tmp_path]), tmp_path / "votes.jsonl")
    listening = guard.listen("127.0.0.1", 0, None)
    server = uvicorn.Server(guard.configured(application(ballot, "mine")))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    yield f"http://127.0.0.1:{listening.getsockname()[1]}/", ballot
    server.should_exit = True
    thread.join()


def opened(browser, address, width=1400, scheme="light"):
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page = context.new_page()
    page.told = []
    page.on("console", lambda message: page.told.append(message.text))
    page.on("pageerror", lambda error: page.told.append(str(error)))
    page.on("request", lambda asked: asked.url.startswith(address) or page.told.append(asked.url))
    page.goto(address)
    sync_api.expect(page.locator("#count")).to_contain_text("left")
    return page


@pytest.mark.parametrize(("width", "scheme"), LOOKS)
def test_the_page_is_quiet_legible_and_not_wider_than_its_window(browser, served, width, scheme):
    page = opened(browser, served[0], width, scheme)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    ratio, whose = page.evaluate(CONTRAST)
    assert ratio >= 4.5, whose
    assert page.locator("#prompt").inner_text()[:20] == WILD[:20]
    assert page.told == []
    page.context.close()


def test_keys_vote_and_take_back(browser, served):
    address, ballot = served
    page = opened(browser, address)
    first = ballot.told["pair"]

    def said(words):
        sync_api.expect(page.locator("#count")).to_have_text(words)

    said("0 votes, 3 pairs left")
    page.keyboard.press("ArrowRight")
    said("1 vote, 2 pairs left")
    assert json.loads(ballot.file.read_text())["vote"] == "b"
    page.keyboard.press("u")
    said("0 votes, 3 pairs left")
    assert ballot.told["pair"] == first
    page.keyboard.press("1")
    said("1 vote, 2 pairs left")
    page.keyboard.press("ArrowDown")
    said("2 votes, 1 pair left")
    page.locator("[data-vote=b]").click()
    said("3 votes, 0 pairs left")
    assert [json.loads(line)["vote"] for line in ballot.file.read_text().splitlines()] == ["a", "neither", "b"]
    assert "Every pair has been voted on" in page.locator("#said").inner_text()
    page.keyboard.press("ArrowLeft")  # there is nothing more to vote on
    page.keyboard.press("Backspace")
    said("2 votes, 1 pair left")
    assert page.told == []
    page.context.close()
