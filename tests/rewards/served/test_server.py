"""What the server answers, and whom."""

import json
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest
import torch
from serving import BODY, bright, health, here, serving, tensors
from starlette.testclient import TestClient

from rewards import Reward, RewardError
from rewards.served import server
from rewards.served.server import app
from rewards.served.wire import CONTENT_TYPE

TYPED = {"Content-Type": CONTENT_TYPE}


def complaining(images, prompts):
    raise ValueError(f"what is {prompts[0]}")


def test_what_is_too_large_or_elsewhere_or_of_another_type_is_refused():
    client = here(app([Reward("bright", bright)], max_bytes=len(BODY)))

    def refused(answer):
        return answer.status_code, answer.json()["error"]

    assert client.post("/bright", content=BODY, headers=TYPED).status_code == 200
    too_large = (413, f"the body may have {len(BODY)} bytes at most")
    assert refused(client.post("/bright", content=BODY + b".", headers=TYPED)) == too_large
    unannounced = (411, "the size of the body must be announced, in Content-Length")
    assert refused(client.post("/bright", content=iter([BODY, b"."]), headers=TYPED)) == unannounced
    unknown = (404, "there is no reward 'brigt' here, did you mean 'bright'?")
    assert refused(client.post("/brigt", content=BODY, headers=TYPED)) == unknown
    assert refused(client.post("/bright", content=BODY)) == (415, f"the content type must be {CONTENT_TYPE}")
    assert refused(client.get("/bright")) == (405, "Method Not Allowed")
    assert client.get("/health").json() == {
        "rewards": {"bright": {"group_wise": False, "columns": [], "waiting": 0, "busy": 0.0}},
        "max_bytes": len(BODY),
        "refused": {"413": 1, "411": 1, "404": 1, "415": 1, "405": 1},
    }
    assert 'flowgrpo_refused_total{status="413"} 1\n' in client.get("/metrics").text


def test_a_token_is_asked_for_everywhere():
    client = TestClient(app([Reward("bright", bright)], token="secret"))  # whatever it calls this machine
    for path in ("/health", "/metrics", "/bright", "/nothing"):
        for header in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
            answer = client.request("POST" if path == "/bright" else "GET", path, headers=header)
            assert (answer.status_code, answer.json()) == (401, {"error": "the token is missing or wrong"})
    assert client.get("/health", headers={"Authorization": "Bearer secret"}).status_code == 200


@pytest.mark.parametrize("names", [["health"], ["a", "a"], ["a/b"], ["../x"]])
def test_a_name_that_cannot_stand_in_a_url_is_refused(names):
    with pytest.raises(RewardError, match="needs another name to be served"):
        app([Reward(name, bright) for name in names])


def test_what_waits_is_left_in_its_sockets_beyond_four_bodies():
    held, asked = threading.Event(), 12

    def late(images, prompts):
        held.wait(60)
        return images.mean((1, 2, 3))

    with serving(late, max_bytes=len(BODY), batch_size=2) as address:
        url = f"http://127.0.0.1:{address[1]}/bright"
        pool = ThreadPoolExecutor(asked)
        jobs = [
            pool.submit(httpx2.post, url, content=BODY, headers=TYPED, timeout=60, verify=False) for _ in range(asked)
        ]
        most, until = 0, time.monotonic() + 30
        while most < 3 and time.monotonic() < until:
            most = max(most, health(address)[1]["rewards"]["bright"]["waiting"])
        for _ in range(8):
            most = max(most, health(address)[1]["rewards"]["bright"]["waiting"])
            time.sleep(0.02)
        held.set()
        assert [job.result().status_code for job in jobs] == [200] * asked
        assert most == server.ROOM - 1  # and one in its call


def test_a_lane_that_hangs_is_told_and_asked_no_more(monkeypatch):
    held = threading.Event()

    def hanging(images, prompts):
        held.wait(60)
        return images.mean((1, 2, 3))

    monkeypatch.setattr(server, "STALLED", 0.2)
    with serving(hanging) as address:
        url, request = (
            f"http://127.0.0.1:{address[1]}/bright",
            {"content": BODY, "headers": TYPED, "timeout": 60, "verify": False},
        )
        first = threading.Thread(target=httpx2.post, args=(url,), kwargs=request)
        first.start()
        until = time.monotonic() + 30
        while health(address)[0] == 200 and time.monotonic() < until:
            time.sleep(0.02)
        status, said = health(address)
        assert status == 503
        assert re.fullmatch(r"the reward 'bright' has not returned for \d+ s", said["error"])
        assert 0.2 < said["rewards"]["bright"]["busy"] < 60
        assert httpx2.post(url, **request).status_code == 503
        held.set()
        first.join()
        assert health(address)[0] == 200
        assert health(address)[1]["refused"]["503"] >= 3


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8100", 200), ("localhost", 200), ("[::1]:8100", 200), ("127.9.9.9", 200),
        ("evil.example:8100", 421), ("127.0.0.1.evil.example", 421), ("localhost@evil.example", 421), ("[::1", 421),
        ("", 421), ("0.0.0.0", 421), ("192.0.2.1", 421),
    ],
)  # fmt: skip
def test_without_a_token_only_names_of_this_machine_are_answered(host, status):
    answer = here(app([Reward("bright", bright)])).get("/health", headers={"Host": host})
    assert answer.status_code == status
    if status == 421:
        assert answer.json()["error"].startswith("without a token only 127.0.0.1 and localhost")


def test_what_is_said_of_long_words_is_short_and_one_line():
    client = here(app([Reward("bright", complaining)]))
    body = tensors(torch.rand(2, 3, 4, 4), prompts=json.dumps(["\n\x1b" * 9 + "x" * 100_000, "b"]))
    for answer in (client.post("/bright", content=body, headers=TYPED), client.post("/" + "a" * 9000, headers=TYPED)):
        assert len(answer.json()["error"]) == 500
        assert answer.json()["error"].isprintable()


def test_nobody_is_sent_to_an_address_of_the_clients():
    answer = here(app([Reward("bright", bright)])).get("/health/", follow_redirects=False)
    assert (answer.status_code, "location" in answer.headers) == (404, False)


def test_half_a_character_in_a_fault_is_written_out(caplog):
    body = tensors(torch.rand(2, 3, 4, 4), prompts='["\\ud800", "b"]')
    client = here(app([Reward("bright", complaining)]))
    answer = client.post("/bright", content=body, headers=TYPED)
    assert (answer.status_code, answer.json()["error"][-14:]) == (422, "what is \\ud800")
    assert caplog.text.endswith("ValueError: what is \\ud800\n")


def test_a_column_with_the_name_of_an_argument_is_a_sentence_in_answer_and_log(caplog):
    body = tensors(torch.rand(2, 3, 4, 4), columns='{"prompts": [1, 2]}')
    client = here(app([Reward("bright", lambda images, prompts, **columns: [0.0] * len(prompts))]))
    answer = client.post("/bright", content=body, headers=TYPED)
    assert answer.status_code == 422
    assert answer.json()["error"].endswith("calls an argument 'prompts', so no column can have that name")
    assert "Traceback" not in caplog.text
