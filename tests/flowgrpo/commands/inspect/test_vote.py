"""Votes on pairs of pictures: what is asked, what is written, and who may vote."""

import json
import mimetypes
import threading
from contextlib import contextmanager

import httpx
import pytest
import uvicorn
from PIL import Image
from planted_run import written

from flowgrpo.commands.inspect.vote import Ballot, Pair, _lock, application, pairs_of
from flowgrpo.errors import InputError
from rewards.models.votes import read_votes
from rewards.served import guard


def folder(place, prompts, suffix=".png"):
    """Samples of some prompts, each of another grey."""
    place.mkdir(parents=True)
    lines = []
    for number, prompt in enumerate(prompts):
        file = place / f"{number}{suffix}"
        Image.new("RGB", (8, 8), (number, number, number)).save(file)
        lines.append({"file": file.name, "prompt": prompt, "seed": number, "step": 0, "rewards": {}})
    (place / "manifest.jsonl").write_text(written(lines))
    return place


def test_pairs_are_those_of_one_prompt_and_prompts_take_turns(tmp_path):
    place = folder(tmp_path / "s", ["a"] * 3 + ["b"] * 2 + ["alone"])
    pairs = pairs_of([place])
    assert sorted(pair.prompt for pair in pairs) == ["a", "a", "a", "b"]
    assert {pairs[0].prompt, pairs[1].prompt} == {"a", "b"}
    for pair in pairs:
        numbers = {int(file.stem) for file in (pair.a, pair.b)}
        assert len(numbers) == 2
        assert numbers <= ({0, 1, 2} if pair.prompt == "a" else {3, 4})
    assert pairs_of([place]) == pairs


def test_runs_and_folders_are_asked_together_and_the_same_picture_is_no_pair(tmp_path):
    one = folder(tmp_path / "run" / "samples", ["a"])
    other = folder(tmp_path / "more", ["a", "a"])  # its first is the same picture
    (pair,) = pairs_of([tmp_path / "run", other])
    assert {pair.a, pair.b} == {one / "0.png", other / "1.png"}


def test_votes_are_lines_that_the_reward_reads_and_undo_takes_the_last_back(tmp_path):
    place = folder(tmp_path / "s", ["a"] * 3)
    file = tmp_path / "votes" / "mine.jsonl"
    ballot = Ballot(pairs_of([place]), file)
    first = ballot.told
    assert (first["votes"], first["left"], first["prompt"]) == (0, 3, "a")
    assert not ballot.undo()
    ballot.vote(first["pair"], "b")
    ballot.vote(ballot.told["pair"], "neither")
    assert ballot.told["left"] == 1
    votes = read_votes(file)
    assert [vote.outcome for vote in votes] == [0.0, 0.5]
    assert votes[0].first.resolve() == ballot.pairs[first["pair"]].a
    assert "time" in json.loads(file.read_text().splitlines()[0])
    with pytest.raises(ValueError, match="another pair"):
        ballot.vote(first["pair"], "a")  # of a page that was left open
    with pytest.raises(ValueError, match="another pair"):
        ballot.vote(ballot.told["pair"], "both")
    assert ballot.undo()
    assert len(read_votes(file)) == 1
    assert ballot.told["left"] == 2

    again = Ballot(pairs_of([place]), file)  # of another day
    assert again.told == ballot.told
    assert again.undo()
    assert again.told == first


def test_a_vote_on_other_pictures_is_not_taken_back_and_one_shown_the_other_way_round_is(tmp_path):
    place, other = folder(tmp_path / "s", ["a"] * 2), folder(tmp_path / "t", ["b"] * 2)
    file = tmp_path / "votes.jsonl"
    ballot = Ballot(pairs_of([place]), file)
    ballot.vote(0, "a")
    elsewhere = Ballot(pairs_of([other]), file)
    assert not elsewhere.undo()
    assert len(read_votes(file)) == 1
    turned = [Pair(pair.prompt, pair.b, pair.a) for pair in pairs_of([place])]
    again = Ballot(turned, file)
    assert again.told["left"] == 0
    assert again.undo()
    assert again.told["left"] == 1


def test_two_ballots_do_not_write_one_file(tmp_path):
    file = tmp_path / "votes.jsonl"
    for _ in range(2):  # the second time it is free again
        with _lock(file), pytest.raises(InputError, match="another flowgrpo vote writes it"), _lock(file):
            pass


@contextmanager
def serving(ballot):
    """A client of a ballot's page."""
    listening = guard.listen("127.0.0.1", 0, None)
    server = uvicorn.Server(guard.configure(application(ballot, "mine")))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    with httpx.Client(base_url=f"http://127.0.0.1:{listening.getsockname()[1]}", trust_env=False) as client:
        yield client
    server.should_exit = True
    thread.join()


@pytest.fixture
def served(tmp_path):
    ballot = Ballot(pairs_of([folder(tmp_path / "s", ["<b>a</b>"] * 3)]), tmp_path / "votes.jsonl")
    with serving(ballot) as client:
        yield client, ballot


def test_the_page_asks_pairs_and_shows_their_pictures(served):
    client, ballot = served
    assert "Which of the two is better?" in client.get("/").text
    told = client.get("/pair").json()
    assert told == ballot.told
    for side in ("a", "b"):
        found = client.get(f"/media/{told['pair']}/{side}")
        assert found.headers["content-type"] == "image/png"
        assert found.content == getattr(ballot.pairs[told["pair"]], side).read_bytes()
    following = client.post("/vote", json={"pair": told["pair"], "vote": "a"}).json()
    assert (following["votes"], following["left"]) == (1, 2)
    assert client.post("/undo", json={}).json() == told


def test_who_may_not_vote_is_refused(served):
    client, ballot = served
    told = ballot.told
    vote, as_json = {"pair": told["pair"], "vote": "a"}, {"content-type": "application/json"}
    for status, options in (
        (415, {"content": json.dumps(vote), "headers": {"content-type": "text/plain"}}),
        (421, {"json": vote, "headers": {"host": "evil.example"}}),
        (409, {"json": {"pair": 99, "vote": "a"}}),
        (409, {"json": ["a"]}),
        (413, {"json": {"x": "y" * 5000}}),
        (422, {"content": b"{", "headers": as_json}),
    ):
        assert client.post("/vote", **options).status_code == status
    assert client.post("/undo").status_code == 415
    assert {client.get(f"/media/{picture}").status_code for picture in ("99/a", "0/c")} == {404}
    assert ballot.told == told


@pytest.mark.parametrize(
    ("suffix", "kind"), [(".jfif", "image/jpeg"), (".gif", "image/gif"), (".BMP", "image/bmp"), (".webp", "image/webp")]
)
def test_a_picture_is_served_as_what_the_table_says(tmp_path, monkeypatch, suffix, kind):
    monkeypatch.setattr(mimetypes, "guess_type", lambda *_: (None, None))  # as on a machine without a table of its own
    ballot = Ballot(pairs_of([folder(tmp_path / "s", ["a", "a"], suffix)]), tmp_path / "votes.jsonl")
    with serving(ballot) as client:
        assert client.get("/media/0/a").headers["content-type"] == kind


def test_what_cannot_be_voted_on_is_one_sentence(tmp_path, refused):
    alone, pair = folder(tmp_path / "alone", ["a", "b"]), folder(tmp_path / "pair", ["a", "a"])
    (tmp_path / "bad.jsonl").write_text("{}\n")
    (tmp_path / "picture.png").write_bytes(bytes(range(256)))
    for words, said in (
        ([alone], "no two different samples of one prompt"),
        ([tmp_path / "none"], "there is no such folder"),
        ([pair, "--out", tmp_path / "bad.jsonl"], "line 1 of"),
        ([pair, "--out", tmp_path / "picture.png"], "line 1 of"),
        ([pair, "--out", tmp_path], "no ordinary file"),
    ):
        assert said in refused("vote", *words)
    for name in ("a.wav", "a.tiff", "a.json"):
        (alone / "manifest.jsonl").write_text(json.dumps({"file": name, "prompt": "a"}) + "\n")
        said = rf"{name} is no picture or film that a browser shows; votes are on .png, .*, .mov$"
        with pytest.raises(InputError, match=said):
            pairs_of([alone])
