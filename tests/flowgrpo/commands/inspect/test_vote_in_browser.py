"""The page that asks for votes in a real browser: by keyboard, light and dark, wide and on a phone."""

import json
import shutil
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
import uvicorn
from browsing import LOOKS, WILD, opened
from PIL import Image
from planted_run import written

from flowgrpo.commands.inspect.vote import Ballot, application, pairs_of
from rewards.served import guard

FILM = Path(__file__).parents[3] / "data" / "film.webm"

sync_api = pytest.importorskip("playwright.sync_api", reason="pip install playwright, to open the pages in a browser")


@pytest.fixture
def served(tmp_path):
    lines = []
    for number in range(3):
        Image.new("RGB", (8, 8), (80 * number, 0, 0)).save(tmp_path / f"{number}.png")
        lines.append({"file": f"{number}.png", "prompt": WILD})
    (tmp_path / "manifest.jsonl").write_text(written(lines))
    with serving(tmp_path) as both:
        yield both


@contextmanager
def serving(folder):
    """The address and the ballot of a served folder of samples."""
    ballot = Ballot(pairs_of([folder]), folder / "votes.jsonl")
    listening = guard.listen("127.0.0.1", 0, None)
    server = uvicorn.Server(guard.configure(application(ballot, "mine")))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    yield f"http://127.0.0.1:{listening.getsockname()[1]}/", ballot
    server.should_exit = True
    thread.join()


@contextmanager
def asked(browser, address, *look):
    """The page, once it has asked for the first pair."""
    with opened(browser, address, *look) as page:
        sync_api.expect(page.locator("#count")).to_contain_text("left")
        yield page


@pytest.mark.parametrize(("width", "scheme"), LOOKS)
def test_the_page_is_quiet_legible_and_not_wider_than_its_window(browser, served, check_look, width, scheme):
    with asked(browser, served[0], width, scheme) as page:
        check_look(page)
        assert page.locator("#prompt").inner_text()[:20] == WILD[:20]


def test_a_film_plays_beside_a_picture(browser, tmp_path):
    shutil.copy(FILM, tmp_path / "film.webm")
    Image.new("RGB", (8, 8), (80, 0, 0)).save(tmp_path / "still.png")
    lines = [{"file": file, "prompt": "a"} for file in ("film.webm", "still.png")]
    (tmp_path / "manifest.jsonl").write_text(written(lines))
    with serving(tmp_path) as (address, ballot), asked(browser, address) as page:
        side = "ab"[ballot.pairs[0].a.name == "still.png"]
        film = page.locator(f"[data-vote={side}] video")
        sync_api.expect(film).to_be_visible()
        sync_api.expect(film).not_to_have_js_property("currentTime", 0)
        assert page.locator(".choice img").count() == 1


def test_keys_vote_and_take_back(browser, served):
    address, ballot = served
    with asked(browser, address) as page:
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
