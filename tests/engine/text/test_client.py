"""Requests to an engine of texts that is there, is not, is too slow, or answers nonsense."""

import fake_engine
import pytest

from flowgrpo.errors import InputError
from flowgrpo.schema.engine import Engine
from flowgrpo_engine.service import EngineError
from flowgrpo_engine.text.client import Client


class Said:
    """An engine that says one thing to everybody."""

    def __init__(self, content, status=200):
        self.content, self.status, self.lock = content, status, fake_engine.threading.Lock()

    def answered(self, path, body):
        return self.status, "application/json", self.content


def client_of(address, **options):
    return Client(Engine(url=address, retries=0, timeout=5, **options))


def said(content, call, status=200):
    with fake_engine.serving(Said(content, status)) as (address, _):
        return call(client_of(address), address)


def complete(client, url):
    return client.completions([{"input_ids": [[1], [2]]}], 1000)


def test_models_with_a_parent_are_adapters():
    content = b'{"data": [{"id": "m", "root": "m", "parent": null}, {"id": "a", "root": "/a", "parent": "m"}]}'
    assert said(content, lambda client, url: client.adapters(url)) == {"a": "/a"}


@pytest.mark.parametrize(
    ("content", "status", "call", "why"),
    [
        (b"<html>", 200, complete, "at /generate did not answer with a list of completions"),
        (b"[" * 999, 200, complete, "at /generate did not answer with a list of completions"),
        (b'{"output_ids": []}', 200, complete, "did not answer with a list of completions"),
        (b"[1, 2]", 200, complete, "did not answer with a list of completions"),
        (b"[{}]", 200, complete, "at /generate answered with 1 completions instead of 2"),
        (b'{"error": {"message": "no such adapter"}}', 400, complete, "/generate answered 400: no such adapter"),
        (b"{}", 200, lambda client, url: client.adapters(url), "/v1/models answered without a list of its models"),
        (
            b"[]",
            200,
            lambda client, url: client.adapters(url),
            "/v1/models did not answer with a JSON obj",
        ),
        (
            b'{"success": false, "error_message": "too\\nmany"}',
            200,
            lambda client, url: client.load_adapter(url, "a", "/a"),
            "/load_lora_adapter answered that it did not: too many",
        ),
        (
            b"{}",
            200,
            lambda client, url: client.unload_adapter(url, "a"),
            "/unload_lora_adapter answered that it did not",
        ),
    ],
)
def test_an_answer_that_makes_no_sense_is_one_sentence_with_its_place(content, status, call, why):
    with pytest.raises(EngineError, match=why):
        said(content, call, status)


def test_an_answer_that_is_too_large_or_too_late_is_cut_off():
    content = b'[{"text": "' + b"x" * 5000 + b'"}]'
    one = [{"input_ids": [[1]]}]
    assert said(content, lambda client, url: client.completions(one, 6000))
    with pytest.raises(EngineError, match="/generate answered with more than 4000 bytes"):
        said(content, lambda client, url: client.completions(one, 4000))
    slow = Said(content)
    slow.answered = lambda path, body: fake_engine.time.sleep(3)
    with fake_engine.serving(slow) as (address, _), pytest.raises(EngineError, match="did not answer within 0.3 s"):
        Client(Engine(url=address, retries=0, timeout=0.3)).completions(one, 6000)


def test_an_engine_that_is_not_there_is_named_before_a_run_begins():
    with pytest.raises(
        InputError, match=r"^run.engine.url: http://.*/v1/models answered without a list of its models$"
    ):
        said(b"{}", lambda client, url: client.greet())
    with fake_engine.serving(Said(b"{}")) as (address, _):
        pass
    with pytest.raises(InputError, match=rf"^run.engine.url: {address}/v1/models could not be reached"):
        client_of(address).greet()
