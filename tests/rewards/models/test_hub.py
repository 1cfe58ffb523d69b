"""What is said of a reward's model, a language model or a data set that the hub does not give."""

import socket
import sys
import threading
import time
from types import SimpleNamespace

import httpx2 as httpx
import huggingface_hub
import pytest
from huggingface_hub import constants, errors

import rewards
from flowgrpo.data import prompts
from flowgrpo.errors import InputError
from flowgrpo.flow.pipeline.loading import load as pipelines
from flowgrpo.mdlm.models import load as loading
from rewards import RewardError
from rewards.models import hub


def answer(kind, status):
    response = httpx.Response(status, request=httpx.Request("GET", "http://127.0.0.1/someone/something"))
    return kind("no", response=response)


UNREACHED = "could not be loaded from the model hub: it cannot be reached, and the cache lacks it"
REASONS = [
    (
        answer(errors.GatedRepoError, 403),
        "is gated: accept its {terms} on its page at the model hub, then log in with `hf ",
    ),
    (answer(errors.RepositoryNotFoundError, 404), "is not at the model hub, or is private: check the name, or log in"),
    (errors.LocalEntryNotFoundError("no"), UNREACHED),
    (httpx.ConnectError("no"), UNREACHED),
]


def raising(below):
    def load(*arguments, **options):
        try:
            raise below
        except Exception as error:
            raise OSError("wrapped") from error

    return load


@pytest.fixture(autouse=True)
def online(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


@pytest.mark.parametrize(("below", "said"), REASONS)
def test_whatever_needs_the_hub_says_why_it_has_nothing(monkeypatch, below, said):
    """A reward, GenEval, a language model and its tokenizer, and prompts of a data set."""
    from rewards.objects import detectors

    monkeypatch.setattr(hub, "is_reachable", lambda: True)
    reward = rewards.load("clip_score", options={"path": "someone/something"}).function
    geneval = rewards.load("geneval", options={"detector": "someone/something", "device": "cpu"}).function
    monkeypatch.setattr(reward, "_load", raising(below), raising=False)
    monkeypatch.setattr(detectors, "load_detector", raising(below))
    monkeypatch.setattr(loading, "config_of", raising(below))
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=raising(below)))

    def load_tokenizer():
        with loading._one_sentence("someone/something", "no tokenizer", {}, trust_remote_code=False):
            raising(below)()

    for kind, named, load in (
        (RewardError, "clip_score: someone/something", lambda: reward.to("cpu")),
        (RewardError, "geneval's detector: 'someone/something'", lambda: geneval._detect),
        (InputError, "model.path: 'someone/something'", lambda: loading.model_paths("someone/something")),
        (InputError, "model.path: 'someone/something'", load_tokenizer),
    ):
        with pytest.raises(kind, match=f"^{named} {said.format(terms='licence')}"):
            load()
    with pytest.raises(InputError, match=f"^prompts.train: hub:owner/name:train {said.format(terms='terms')}"):
        prompts.load("hub:owner/name:train", "prompts.train")


def test_a_data_set_is_downloaded_by_another_command_a_tag_by_none_and_other_reasons_are_not_the_hub_s():
    said = hub.explain_failure(ConnectionError("no"), "owner/name", "set prompts.train to a file", dataset=True)
    assert said.endswith("once with `hf download --repo-type dataset owner/name`, or set prompts.train to a file")
    assert hub.explain_failure(ConnectionError("no"), "openai", "give a file").endswith("or a part of it; give a file")
    assert hub.explain_failure(ValueError("no"), "owner/name", "") is None


def test_a_mistyped_folder_is_no_hub_id(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("redder", "bluer"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    said = hub.explain_failure(ConnectionError("no"), "runs/reder", "set model.path to a folder")
    assert said == "is not in the folder runs, did you mean 'runs/redder'?"
    assert "cannot be reached" in hub.explain_failure(ConnectionError("no"), "runs/llada", "set model.path to a folder")


def test_a_hub_that_did_not_answer_is_asked_again_a_minute_later(monkeypatch):
    answers, now = iter([False, True]), [0.0]
    monkeypatch.setattr(hub, "_ask", lambda: next(answers))
    monkeypatch.setattr(hub, "_answers", [])
    monkeypatch.setattr(hub.time, "monotonic", lambda: now[0])
    found = []
    for seconds in (0, 59, 60, 1000):
        now[0] = seconds
        found.append(hub.is_reachable())
    assert found == [False, False, True, True]


@pytest.fixture
def hub_at(monkeypatch):
    """Let a socket that accepts connections be the hub, and forget before and after whether it answered."""
    hub._answers.clear()
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        yield server
    hub._answers.clear()


def test_the_hub_is_asked_once_whether_it_answers(hub_at, monkeypatch):
    hub_at.close()
    assert not hub.can_load("someone/something", "config.json")
    monkeypatch.setattr(huggingface_hub, "get_session", lambda: pytest.fail("asked again"))
    assert not hub.can_load("someone/else", "config.json")


def test_a_hub_that_is_silent_is_not_waited_for(hub_at):
    before = time.monotonic()
    assert not hub.is_reachable()
    assert time.monotonic() - before < 5


@pytest.mark.parametrize("status", [200, 404, 503])
def test_a_hub_that_answers_is_reached(hub_at, status):
    answer = f"HTTP/1.1 {status} any\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"

    def serve():
        connection, _ = hub_at.accept()
        with connection:
            connection.recv(1 << 16)
            connection.sendall(answer.encode())

    server = threading.Thread(target=serve)
    server.start()
    assert hub.is_reachable()
    server.join()
    with hub.cache_if_unreachable("someone/something"):
        assert not constants.HF_HUB_OFFLINE


@pytest.mark.parametrize("load", [pipelines.index_of, loading.model_paths])
def test_a_model_of_an_unreachable_hub_is_refused_without_a_second_try(monkeypatch, capfd, load):
    monkeypatch.setattr(hub, "is_reachable", lambda: False)
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("tried again"))
    with pytest.raises(InputError, match=UNREACHED):
        load("someone/something")
    assert capfd.readouterr() == ("", "")
    assert not constants.HF_HUB_OFFLINE


def test_a_context_in_another_tells_an_unreachable_hub_from_one_that_must_not_be_asked(monkeypatch, tmp_path):
    monkeypatch.setattr(hub, "is_reachable", lambda: False)

    def said():
        with hub.cache_if_unreachable("someone/something"), hub.cache_if_unreachable("someone/else"):
            assert constants.HF_HUB_OFFLINE
            return hub.explain_failure(ConnectionError("no"), "someone/something", "")

    assert "it cannot be reached" in said()
    with hub.cache_if_unreachable(str(tmp_path)):
        assert not constants.HF_HUB_OFFLINE
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set" in said()


def test_what_is_in_the_cache_may_be_given_without_the_hub(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda name, file: str(tmp_path / name / file))
    monkeypatch.setattr(hub, "is_reachable", lambda: False)
    assert hub.can_load("someone/something", "config.json")
