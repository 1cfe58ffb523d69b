"""Requests to an engine that is there, is not, is too slow, or answers nonsense."""

import json
from pathlib import Path

import fake_engine
import msgpack
import pytest

from flowgrpo.errors import InputError
from flowgrpo.schema.engine import Engine
from flowgrpo_engine.flow.client import Client
from flowgrpo_engine.service import EngineError

DATA = Path(__file__).parents[2] / "data" / "engine"


class Said:
    """An engine that says one thing to everybody."""

    def __init__(self, content, status=200):
        self.content, self.status, self.asked, self.lock = content, status, [], fake_engine.threading.Lock()

    def answered(self, path, body):
        self.asked.append((path, body))
        return self.status, "application/json", self.content


def client_of(address, **options):
    return Client(Engine(url=address, retries=0, timeout=5, **options))


def said(content, call, status=200):
    with fake_engine.serving(Said(content, status)) as (address, _):
        return call(client_of(address), address)


def test_what_is_active_and_checksums_are_read_as_the_source_writes_them():
    listed, sums = ((DATA / f"{name}.json").read_bytes() for name in ("list_loras", "checksum"))
    assert said(listed, lambda client, url: client.active(url)) == {"transformer": ["t-transformer-0123456789abcdef"]}
    assert said(sums, lambda client, url: client.checksums(url, ["transformer"])) == json.loads(sums)


def test_adapters_of_two_networks_are_told_as_lists_and_those_of_one_as_texts():
    engine = Said(b'{"status": "ok"}')
    with fake_engine.serving(engine) as (address, _):
        client = client_of(address)
        client.set_adapters(address, {"transformer": ("a", "/a.safetensors")})
        client.set_adapters(address, {"transformer": ("a", "/a.safetensors"), "transformer_2": ("b", "/b.safetensors")})
    one, two = (body for _, body in engine.asked)
    assert [one[key] for key in ("lora_nickname", "lora_path", "target")] == ["a", "/a.safetensors", "transformer"]
    assert [two[key] for key in ("lora_nickname", "lora_path", "target")] == [
        ["a", "b"],
        ["/a.safetensors", "/b.safetensors"],
        ["transformer", "transformer_2"],
    ]
    assert (one["strength"], one["merge_mode"]) == (1.0, "merge")


@pytest.mark.parametrize(
    ("content", "status", "call", "why"),
    [
        (b"<html>", 200, "active", "/v1/list_loras did not answer with a JSON object"),
        (b"[" * 9999, 200, "active", "/v1/list_loras did not answer with a JSON object"),
        (b"{}", 200, "active", "/v1/list_loras did not answer which adapters are active"),
        (b'{"active": {"transformer": ["x"]}}', 200, "active", "did not answer with lists of adapters"),
        (b'{"detail": "Failed to list"}', 500, "active", r"/v1/list_loras answered 500: .*Failed to list"),
        (
            b'{"status": "no"}',
            200,
            "remove_adapters",
            "/v1/unmerge_lora_weights answered with the status 'no', not 'ok'",
        ),
        (b'{"transformer": "not_found"}', 200, "checksums", "/get_weights_checksum knows no network 'transformer'"),
        (b'{"error": "Pipeline is not initialized"}', 200, "checksums", "knows no network 'transformer'"),
    ],
)
def test_an_answer_that_makes_no_sense_is_one_sentence_with_its_place(content, status, call, why):
    more = (["transformer"],) if call == "checksums" else ()
    with pytest.raises(EngineError, match=why):
        said(content, lambda client, url: getattr(client, call)(url, *more), status)


def test_an_answer_that_is_too_large_or_too_late_is_cut_off(engine, url):
    asked = [{"num_outputs_per_prompt": 1}]
    engine.answer = msgpack.packb([{"pad": "x" * 5000}])
    assert client_of(url).rollouts(asked, 6000)
    with pytest.raises(EngineError, match="/rollout/generate answered with more than 4000 bytes"):
        client_of(url).rollouts(asked, 4000)
    engine.delay = 3.0
    with pytest.raises(EngineError, match=r"/rollout/generate did not answer within 0.3 s"):
        Client(Engine(url=url, retries=0, timeout=0.3)).rollouts(asked, 6000)


def test_requests_are_spread_over_several_engines_and_answers_keep_their_order(engine):
    engine.edit = lambda samples: samples[0].update(who="first")
    other = Said(b"")
    answers = [msgpack.packb([{"n": n}]) for n in range(6)]
    other.answered = lambda path, body: (200, "application/msgpack", answers[body["n"]])
    with fake_engine.serving(other) as (left, _), fake_engine.serving(other) as (right, _):
        client = client_of([left, right], requests=3)
        found = client.rollouts([{"num_outputs_per_prompt": 1, "n": n} for n in range(6)], 1000)
    assert found == [[{"n": n}] for n in range(6)]


def test_an_engine_that_is_not_there_is_named_before_a_run_begins():
    with fake_engine.serving(Said(b"{}")) as (address, _):
        pass
    with pytest.raises(InputError, match=rf"^run.engine.url: {address}/v1/list_loras could not be reached"):
        client_of(address).greet()
    with pytest.raises(InputError, match="^run.engine.url: 'localhost' is not an address such as"):
        client_of("localhost")
    with pytest.raises(InputError, match="^run.engine.token_env: the environment variable NO_SUCH"):
        client_of("http://127.0.0.1:1", token_env="NO_SUCH")
