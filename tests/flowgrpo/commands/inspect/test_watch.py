"""The page that follows a run: what it shows while files grow, break and go, whom it answers, and how it ends."""

import fcntl
import json
import socket
import warnings
from importlib import util

import httpx2
import pytest
from planted_run import LINES, run_of, trained, with_samples, with_trees, written
from serving import here
from watching import watching

from flowgrpo.commands.inspect import watch
from flowgrpo.training.run.run_folder import LOCK


def client(run):
    return here(watch.application(run, lambda: False))


@pytest.fixture
def run(tmp_path):
    return run_of(tmp_path / "r")


def test_a_run_without_metrics_has_no_iteration_yet(tmp_path):
    (tmp_path / LOCK).touch()
    answer = client(tmp_path).get("/")
    assert answer.status_code == 200
    assert "no iteration yet" in answer.text
    assert 'id="live"' in answer.text


def test_a_line_that_is_being_written_is_left_out_until_it_is_whole(run):
    same = client(run)
    line = json.dumps(trained(3, 0.6)) + "\n"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (run / "metrics.jsonl").write_text(written(LINES) + line[:50])
        assert "iteration 2 of 4" in same.get("/").text
    (run / "metrics.jsonl").write_text(written(LINES) + line)
    assert "iteration 3 of 4" in same.get("/").text


def test_a_run_that_is_resumed_goes_back_and_one_that_is_gone_is_told(run, tmp_path):
    same = client(run)
    assert "iteration 2 of 4" in same.get("/").text
    (run / "metrics.jsonl").write_text(written(LINES[:2]))
    assert "iteration 1 of 4" in same.get("/").text
    run.rename(tmp_path / "s")
    answer = same.get("/")
    assert (answer.status_code, "the folder is not there any more" in answer.text) == (200, True)
    (tmp_path / "s").rename(run)
    assert "iteration 1 of 4" in same.get("/").text


def test_a_run_that_cannot_be_read_says_why_and_recovers(run):
    same = client(run)
    (run / "metrics.jsonl").write_text('{"<b>": \n' + written(LINES))
    page = same.get("/").text
    assert "The run cannot be read now" in page
    assert "metrics.jsonl:1: not valid JSON" in page
    (run / "metrics.jsonl").write_text(written(LINES))
    assert "iteration 2 of 4" in same.get("/").text


@pytest.mark.parametrize("file", [*watch.FILES, "trees/step-000002/0002.json"])
def test_each_file_that_the_page_shows_is_looked_at(tmp_path, file):
    run = with_trees(with_samples(run_of(tmp_path / "r"), [0.1]))
    watched = watch.Watched(run)
    before, age = watched.look()
    assert watched.look()[0] == before
    assert age >= 0
    path = run / file
    path.write_text((path.read_text() if path.exists() else "") + "\n")
    assert watched.look()[0] != before


def test_a_page_is_made_once_for_each_state(run, monkeypatch):
    read, count = watch.read, []
    monkeypatch.setattr(watch, "read", lambda folder: count.append(folder) or read(folder))
    same = client(run)
    assert same.get("/").text == same.get("/").text
    assert len(count) == 1
    (run / "log.txt").write_text("late\n")
    assert "late" in same.get("/").text
    assert len(count) == 2


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8200", "192.168.0.2", "localhost.evil.example", ""])
def test_other_names_of_this_machine_are_not_answered(run, host):
    same = client(run)
    for path in ("/", "/events"):
        answer = same.get(path, headers={"host": host})
        assert answer.status_code == 421
        assert "iteration" not in answer.text


def test_it_answers_get_alone_at_two_addresses(run):
    same = client(run)
    for method in ("post", "put", "delete", "patch", "options"):
        assert getattr(same, method)("/").status_code == 405
    for path in ("/metrics.jsonl", "/..%2fconfig.yaml", "/events/"):
        assert same.get(path, follow_redirects=False).status_code == 404
    policy = same.get("/").headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "connect-src 'self'" in policy


def states(lines):
    """The events of a stream: the state of each."""
    for line in lines:
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


def test_events_tell_each_change_until_it_is_interrupted(run):
    with (
        (run / LOCK).open("w") as lock,
        watching(run) as url,
        httpx2.Client(timeout=60) as asking,
        asking.stream("GET", f"{url}events") as answer,
    ):
        fcntl.flock(lock, fcntl.LOCK_EX)  # as a run holds it
        assert answer.headers["content-type"].startswith("text/event-stream")
        told = states(answer.iter_lines())
        first = next(told)
        assert f'data-live="{first["state"]}"' in asking.get(url).text
        with (run / "metrics.jsonl").open("a") as metrics:
            metrics.write(json.dumps(trained(3, 0.6)) + "\n")
        second = next(told)
        assert second["state"] != first["state"]
        page = asking.get(url).text
        assert f'data-live="{second["state"]}"' in page
        assert "iteration 3 of 4" in page
        (run / "trees").mkdir()
        (run / "trees/step-000003").mkdir()
        assert next(told)["state"] != second["state"]
    left = [LOCK, "config.yaml", "environment.json", "log.txt", "metrics.jsonl", "trees"]
    assert sorted(path.name for path in run.iterdir()) == left


def test_what_cannot_be_served_is_refused_in_one_sentence(run, refused, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert "--port: cannot listen on 127.0.0.1" in refused("watch", run, "--port", taken.getsockname()[1])
    find = util.find_spec
    module = "flowgrpo.commands.scores.serve"
    monkeypatch.setattr(f"{module}.find_spec", lambda name: None if name == "uvicorn" else find(name))
    assert refused("watch", run) == "flowgrpo watch needs the package uvicorn: pip install 'flowgrpo[serve]'"
