import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
from contextlib import contextmanager, suppress

import httpx2
import numpy as np
import pytest
import torch
import uvicorn
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save
from starlette.testclient import TestClient

import rewards
from flowgrpo.cli import main
from flowgrpo.data.scenes import arrange, draw, every_caption
from rewards import Reward, RewardError, guard, server
from rewards.server import app
from rewards.wire import CONTENT_TYPE, MOST_HEADER, as_floats, decode, encode

MINE = """
import time
from pathlib import Path

def wait():
    while Path("hold").exists():
        time.sleep(0.01)

def checksum(images, prompts):
    return images.double().mul(2.0 ** 30).sum((1, 2, 3))

def red(images, prompts):
    return images[:, 0].mean((1, 2))

def letters(texts, prompts, extra):
    return [len(text) + n for text, n in zip(texts, extra)]

def some(images, prompts, count):
    return [None if n is None else float("nan") if n == "nan" else n / 3 for n in count]

def size(images, prompts):
    wait()
    if "broken" in prompts:
        raise RuntimeError("out of luck")
    if "leave" in prompts:
        raise SystemExit(3)
    return [len(prompts)] * len(prompts)

class Ranked:
    group_wise = True
    def __init__(self, scale=1.0):
        self.scale = scale
    def __call__(self, images, prompts):
        wait()
        return [self.scale * len(prompts)] * len(prompts)
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """URLs by name of rewards that another process serves, and the folder where it runs."""
    folder = tmp_path_factory.mktemp("served")
    (folder / "mine.py").write_text(MINE)
    names = ("checksum", "red", "letters", "some", "size")
    words = ["shapes", *(f"./mine.py:{name}" for name in names), "{use: './mine.py:Ranked', options: {scale: 2.0}}"]
    command = [sys.executable, "-m", "flowgrpo", "serve", *words, "--port", "0"]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True)
    lines = [process.stdout.readline().split() for _ in words]
    yield {**dict(lines), "folder": folder}
    process.kill()
    process.wait()


def pictures(number, seed=0):
    """Drawn captions under noise, and captions of which half are those of other pictures."""
    rng = np.random.default_rng(seed)
    texts = [every_caption()[i] for i in rng.integers(0, len(every_caption()), number)]
    images = np.stack([draw(arrange(text, rng)) for text in texts])
    noisy = (images + 0.05 * rng.standard_normal(images.shape)).clip(0, 1)
    return torch.from_numpy(noisy.astype(np.float32)), texts[: number // 2] + texts[: number - number // 2]


def counted(url):
    """What the server has counted for the reward at a URL."""
    base, _, name = url.rpartition("/")
    lines = [line.split() for line in httpx2.get(f"{base}/metrics").text.splitlines() if f'"{name}"' in line]
    return {key.partition("{")[0].removeprefix("flowgrpo_"): float(value) for key, value in lines}


def in_a_row(served, name, *calls):
    """What each call returned or raised, when all came, in this order, while the first was under way."""
    results = [None] * len(calls)

    def run(i):
        try:
            results[i] = calls[i]()
        except Exception as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(calls))]
    hold = served["folder"] / "hold"
    hold.touch()
    before = counted(served[name])["requests_total"]
    for i, thread in enumerate(threads):
        thread.start()
        while counted(served[name])["requests_total"] < before + i + 1:
            time.sleep(0.01)
    hold.unlink()
    for thread in threads:
        thread.join()
    return results


def test_shapes_in_another_process_gives_the_local_numbers(served):
    images, texts = pictures(24)
    local, remote = rewards.load("shapes"), rewards.load(served["shapes"])
    assert remote.name == "shapes"
    values = local(images, texts, {})
    assert len(set(values.tolist())) > 3
    assert remote(images, texts, {"unknown": [object()] * 24}).equal(values)  # takes no columns, and is sent none


def test_texts_travel_too(served):
    reward = rewards.load(served["letters"])
    assert reward(["four", "µ", ""], ["a", "b", "c"], {"extra": [1, 2, 3]}).tolist() == [5, 3, 3]


def test_a_layout_in_memory_changes_no_bit(served):
    images = pictures(4)[0].contiguous(memory_format=torch.channels_last)
    reward = Reward("red", lambda images, prompts: images[:, 0].mean((1, 2)))
    assert rewards.load(served["red"])(images, ["a"] * 4, {}).equal(reward(images, ["a"] * 4, {}))


def test_every_bit_of_a_float_arrives(served):
    images, texts = pictures(5)
    assert len(torch.unique(images)) > 2**14
    expected = images.double().mul(2.0**30).sum((1, 2, 3))
    assert rewards.load(served["checksum"])(images, texts, {}).equal(expected)


def test_columns_travel_and_none_and_not_a_number_come_back_as_the_contract_has_them(served):
    reward = rewards.load(served["some"])
    values = reward(torch.rand(4, 3, 8, 8), ["a"] * 4, {"count": [1, None, "nan", 2], "other": [1] * 4})
    assert values[[0, 3]].tolist() == [1 / 3, 2 / 3]
    assert values[1].isnan()  # not applicable
    assert values[2].isinf()  # lost


def test_requests_that_wait_are_joined_and_a_broken_one_hurts_itself_alone(served):
    reward = rewards.load(served["size"], options={"retries": 0})

    def call(*prompts):
        return lambda: reward(torch.rand(len(prompts), 3, 8, 8), prompts, {}).tolist()

    assert in_a_row(served, "size", call("a"), call("b", "c"), call("d")) == [[1], [3, 3], [3]]
    first, good, broken, other = in_a_row(served, "size", call("a"), call("b", "c"), call("broken"), call("d"))
    assert (first, good, other) == ([1], [2, 2], [1])  # after the four together failed, each alone
    assert isinstance(broken, RewardError)
    assert re.search(r"500: the reward 'size' failed: RuntimeError: out of luck", str(broken))
    *others, left = in_a_row(served, "size", call("a"), call("b", "c"), call("d"), call("leave"))
    assert others == [[1], [2, 2], [1]]
    assert re.search(r"500: the reward 'size' failed: SystemExit: 3", str(left))

    def larger():
        return reward(torch.rand(1, 3, 9, 9), ["c"], {}).tolist()

    assert in_a_row(served, "size", call("a"), call("b"), larger, call("d")) == [[1], [1], [1], [1]]


def test_a_group_wise_reward_is_known_as_such_and_never_joined(served):
    reward = rewards.load(served["Ranked"])
    assert reward.group_wise
    call = [lambda n=n: reward(torch.rand(n, 3, 8, 8), ["a"] * n, {}).tolist() for n in (1, 2, 3)]
    assert in_a_row(served, "Ranked", *call) == [[2.0], [4.0] * 2, [6.0] * 3]


def test_metrics_count(served):
    before = counted(served["checksum"])
    rewards.load(served["checksum"])(torch.rand(3, 3, 8, 8), ["a"] * 3, {})
    after = counted(served["checksum"])
    grown = {key: after[key] - before[key] for key in after}
    assert grown.pop("seconds_total") > 0
    assert grown == {"requests_total": 1, "failures_total": 0, "calls_total": 1, "samples_total": 3, "waiting": 0}


# What comes in, in this process.


def bright(images, prompts):
    return images.mean((1, 2, 3))


def here(application):
    """A client of an application in this process."""
    return TestClient(application, base_url="http://127.0.0.1")


BODY = b"".join(encode(torch.rand(2, 3, 4, 4), ["a", "b"], {"n": [1, 2]}, "float32"))


def tensors(samples, prompts='["a", "b"]', columns="{}"):
    return save({"samples": samples}, {"prompts": prompts, "columns": columns})


def written(**card):
    """A safetensors file of 8 zeros, described by a card that is right but for what is changed."""
    card = {"dtype": "F32", "shape": [2, 1, 4], "data_offsets": [0, 32], **card}
    header = json.dumps({"samples": card, "__metadata__": {"prompts": '["a", "b"]', "columns": "{}"}}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(32)


def test_the_card_of_the_samples_is_right_but_for_what_is_changed():
    assert decode(bytearray(written())).samples.equal(torch.zeros(2, 1, 4))


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (written(shape=[2, 1, 8]), "samples need 64 bytes"),
        (written(shape=[2, 1, 2**62]), "samples need .* bytes"),
        (written(shape=[2, 10**4299, 10**4299]), r"samples have the shape \[2, 10000"),  # their product has no digits
        (tensors(torch.rand(2, 3, 4, 4), columns='{"images": [1, 2]}'), "no column can have that name"),
        (written(shape=[2, -1, -4]), r"the shape \[2, -1, -4\]"),
        (written(shape=[2, 1.0, 4]), r"the shape \[2, 1.0, 4\]"),
        (written(shape="214"), "the shape 214"),
        (written(data_offsets=[4, 36]), "samples need 32 bytes"),
        (written(data_offsets=None), "samples need 32 bytes"),
        (written(dtype=["F32"]), r"samples are \['F32'\]"),
        (b"\x02" + bytes(7) + b"[]", "its header is not a JSON object of objects"),
        (b"\x12" + bytes(7) + b'{"__metadata__":1}', "its header is not a JSON object of objects"),
        (b"\x0d" + bytes(7) + b'{"samples":1}', "samples have no dtype, shape and data_offsets"),
        (b"", "is not a safetensors file"),
        (b"\x80\x04\x95garbage that looks like a pickle.", "is not a safetensors file"),
        (BODY[:-1], "is not a safetensors file"),
        (BODY + b"more", "is not a safetensors file"),
        (save({"images": torch.rand(2, 3, 4, 4)}), "must hold one tensor, named samples, or texts"),
        (save({"samples": torch.rand(2, 3, 4, 4)}), "must hold prompts"),
        (
            save({}, {"texts": "[]", "prompts": "[]", "columns": "{}"}),
            "texts in the header must be strings, one or more",
        ),
        (
            save({}, {"texts": "[1]", "prompts": "[1]", "columns": "{}"}),
            "texts in the header must be strings, one or more",
        ),
        (tensors(torch.rand(2, 3, 4, 4).double()), "F64, not F32 or U8"),
        (tensors(torch.rand(2, 3)), r"the shape \[2, 3\]"),
        (tensors(torch.rand(0, 3, 4, 4)), r"the shape \[0, 3, 4, 4\]"),
        (tensors(torch.rand(2, 3, 4, 4), '["a"]'), "prompts must be 2 strings"),
        (tensors(torch.rand(2, 3, 4, 4), '["a", 1]'), "prompts must be 2 strings"),
        (tensors(torch.rand(2, 3, 4, 4), "a"), "prompts in the header are not JSON"),
        (tensors(torch.rand(2, 3, 4, 4), "[" * 100_000), "prompts in the header are not JSON"),
        (tensors(torch.rand(2, 3, 4, 4), columns="[]"), "columns in the header must be a JSON object"),
        (tensors(torch.rand(2, 3, 4, 4), columns='{"n": [1]}'), "the column 'n' must be a list of 2"),
    ],
)
def test_a_body_that_is_no_batch_is_refused_in_a_sentence(body, said):
    client = here(app([Reward("bright", lambda images, prompts, **columns: bright(images, prompts))]))
    answer = client.post("/bright", content=body, headers={"Content-Type": CONTENT_TYPE})
    assert answer.status_code == 422
    assert re.search(said, answer.json()["error"])
    assert client.post("/bright", content=BODY, headers={"Content-Type": CONTENT_TYPE}).status_code == 200


@settings(max_examples=300, deadline=None)
@given(st.integers(0, len(BODY) - 1), st.binary(min_size=1, max_size=4))
def test_no_body_whatever_raises_anything_but_a_sentence(place, data):
    try:
        batch = decode(bytearray(BODY[:place] + data + BODY[place + len(data) :]))
    except ValueError:
        return
    assert len(batch.samples) == len(batch.prompts)


def test_what_is_too_large_or_elsewhere_or_of_another_type_is_refused():
    client = here(app([Reward("bright", bright)], max_bytes=len(BODY)))
    headers = {"Content-Type": CONTENT_TYPE}

    def refused(answer):
        return answer.status_code, answer.json()["error"]

    assert client.post("/bright", content=BODY, headers=headers).status_code == 200
    too_large = (413, f"the body may have {len(BODY)} bytes at most")
    assert refused(client.post("/bright", content=BODY + b".", headers=headers)) == too_large
    unannounced = (411, "the size of the body must be announced, in Content-Length")
    assert refused(client.post("/bright", content=iter([BODY, b"."]), headers=headers)) == unannounced
    unknown = (404, "there is no reward 'brigt' here, did you mean 'bright'?")
    assert refused(client.post("/brigt", content=BODY, headers=headers)) == unknown
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


# What is meant to hurt.


@contextmanager
def serving(reward, **options):
    """Serve a function from a thread; yields the address."""
    with server.listen("127.0.0.1", 0, None) as listening:
        own = uvicorn.Server(guard.configured(app([Reward("bright", reward)], **options)))
        thread = threading.Thread(target=own.run, args=([listening],))
        thread.start()
        try:
            yield listening.getsockname()
        finally:
            own.should_exit = True
            thread.join()


def health(address):
    answer = httpx2.get(f"http://127.0.0.1:{address[1]}/health", timeout=60)
    return answer.status_code, answer.json()


def head(*lines):
    return b"\r\n".join([b"POST /bright HTTP/1.1", b"Host: 127.0.0.1", *lines, b"", b""])


def asking(body):
    return head(f"Content-Type: {CONTENT_TYPE}".encode(), f"Content-Length: {len(body)}".encode())


def ended(sock):
    """Whether the other side has closed, after what it may have said."""
    sock.settimeout(2)
    try:
        while sock.recv(1 << 16):
            pass
    except ConnectionResetError:
        pass
    except TimeoutError:
        return False
    return True


@pytest.mark.parametrize("begun", [b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX: ", b"GET /", b"X" * 100])
def test_a_head_without_end_is_refused_after_16_kib(begun):
    with serving(bright) as address, socket.create_connection(address) as sock:
        sock.sendall(begun + b"x" * (2 * guard.HEAD))
        assert sock.recv(100).startswith(b"HTTP/1.1 400")
        assert ended(sock)
        assert health(address)[1]["refused"] == {"400": 1}


@pytest.mark.parametrize("pause", [0, 0.2])  # while the application answers, and after it has
@pytest.mark.parametrize("rest", [b"no number\r\n", b"0\r\n" + b"x: y\r\n" * guard.HEAD, b"3\r\nabcd\r\n"])
@pytest.mark.parametrize("method", [b"POST", b"HEAD"])  # the answer to which has no body
def test_a_body_that_is_no_http_ends_its_connection_in_silence(method, rest, pause, caplog):
    with serving(bright) as address, socket.create_connection(address) as sock:
        begun = head(f"Content-Type: {CONTENT_TYPE}".encode(), b"Transfer-Encoding: chunked")
        sock.sendall(begun.replace(b"POST", method) + (b"" if pause else rest))
        time.sleep(pause)
        with suppress(OSError):  # which may have ended by now
            sock.sendall(rest)
        assert ended(sock)
        assert health(address)[1]["refused"]["400"] == 1
    assert caplog.text == ""


def test_who_says_nothing_keeps_nobody_out(monkeypatch):
    monkeypatch.setattr(guard, "CONNECTIONS", 8)
    with serving(bright) as address, httpx2.Client(base_url=f"http://127.0.0.1:{address[1]}") as early:
        assert early.get("/health").status_code == 200
        silent = [socket.create_connection(address) for _ in range(20)]
        for sock in silent:
            with suppress(OSError):
                sock.sendall(b"GET /health HTTP/1.1\r\nX: ")
        assert early.get("/health").status_code == 200  # whose connection stays
        assert health(address)[0] == 200
        assert all(ended(sock) for sock in silent[:10])
        for sock in silent:
            sock.close()


def test_a_head_that_drips_is_waited_for_in_vain(monkeypatch):
    monkeypatch.setattr(guard, "FIRST", 0.3)
    with serving(bright) as address, socket.create_connection(address) as sock:
        sock.settimeout(0.05)
        started = time.monotonic()
        with pytest.raises(OSError, match="reset|pipe|abort"):  # noqa: PT012
            while time.monotonic() < started + 3:
                sock.sendall(b"x")
                time.sleep(0.02)
        assert 0.2 < time.monotonic() - started < 1.5
        assert health(address)[1]["refused"] == {"late": 1}


def test_a_body_that_drips_is_waited_for_in_vain(monkeypatch):
    monkeypatch.setattr(server, "ARRIVAL", 0.3)
    with serving(bright) as address, socket.create_connection(address, 3) as sock:
        sock.sendall(asking(BODY) + BODY[:-1])
        assert sock.recv(100).startswith(b"HTTP/1.1 408")


def test_what_waits_is_left_in_its_sockets_beyond_four_bodies():
    held, asked = threading.Event(), 12

    def late(images, prompts):
        held.wait(60)
        return images.mean((1, 2, 3))

    with serving(late, max_bytes=len(BODY), batch_size=2) as address:
        url = f"http://127.0.0.1:{address[1]}/bright"
        statuses = []

        def ask():
            answer = httpx2.post(url, content=BODY, headers={"Content-Type": CONTENT_TYPE}, timeout=60)
            statuses.append(answer.status_code)

        threads = [threading.Thread(target=ask) for _ in range(asked)]
        for thread in threads:
            thread.start()
        most, until = 0, time.monotonic() + 30
        while most < 3 and time.monotonic() < until:
            most = max(most, health(address)[1]["rewards"]["bright"]["waiting"])
        for _ in range(20):
            most = max(most, health(address)[1]["rewards"]["bright"]["waiting"])
            time.sleep(0.02)
        held.set()
        for thread in threads:
            thread.join()
        assert most == server.ROOM - 1  # and one in its call
        assert statuses == [200] * asked


def test_a_lane_that_hangs_is_told_and_asked_no_more(monkeypatch):
    held = threading.Event()

    def hanging(images, prompts):
        held.wait(60)
        return images.mean((1, 2, 3))

    monkeypatch.setattr(server, "STALLED", 0.2)
    with serving(hanging) as address:
        url, kind = f"http://127.0.0.1:{address[1]}/bright", {"Content-Type": CONTENT_TYPE}
        first = threading.Thread(
            target=httpx2.post, args=(url,), kwargs={"content": BODY, "headers": kind, "timeout": 60}
        )
        first.start()
        until = time.monotonic() + 30
        while health(address)[0] == 200 and time.monotonic() < until:
            time.sleep(0.02)
        status, said = health(address)
        assert status == 503
        assert re.fullmatch(r"the reward 'bright' has not returned for \d+ s", said["error"])
        assert 0.2 < said["rewards"]["bright"]["busy"] < 60
        assert httpx2.post(url, content=BODY, headers=kind).status_code == 503
        held.set()
        first.join()
        assert health(address)[0] == 200
        assert health(address)[1]["refused"]["503"] >= 3


def test_a_header_is_short_and_takes_forty_times_its_size_at_most():
    long = b"[" + b" " * MOST_HEADER + b"]"
    with pytest.raises(ValueError, match=f"a header of {MOST_HEADER} bytes at most"):
        decode(bytearray(len(long).to_bytes(8, "little") + long))
    for value in ("[]", "{}", "[{}]", "0.5", '"\U0001f600"', '{"":0}'):
        # a wide letter makes all text four times as large
        columns = f'{{"n": [{",".join([value] * (200_000 // len(value)))}], "\U0001f600": 0}}'
        metadata = {"texts": json.dumps(["a"]), "prompts": json.dumps(["a"]), "columns": columns}
        header = json.dumps({"__metadata__": metadata}, ensure_ascii=False).encode()
        body = bytearray(len(header).to_bytes(8, "little") + header)
        tracemalloc.start()
        with pytest.raises(ValueError, match="the column 'n' must be a list of 1"):
            decode(body)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 40 * len(header)


def test_levels_are_made_floats_when_their_turn_comes():
    body = b"".join(encode(torch.tensor([[[[0.0, 0.2, 1.0]]]]), ["a"], {}, "uint8"))
    samples = decode(bytearray(body)).samples
    assert samples.dtype == torch.uint8
    assert as_floats(samples).flatten().tolist() == pytest.approx([0, 0.2, 1])


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
    def complaining(images, prompts):
        raise ValueError(f"what is {prompts[0]}")

    client = here(app([Reward("bright", complaining)]))
    body = tensors(torch.rand(2, 3, 4, 4), prompts=json.dumps(["\n\x1b" * 9 + "x" * 100_000, "b"]))
    typed = {"Content-Type": CONTENT_TYPE}
    for answer in (client.post("/bright", content=body, headers=typed), client.post("/" + "a" * 9000, headers=typed)):
        assert len(answer.json()["error"]) == 500
        assert answer.json()["error"].isprintable()


def test_nobody_is_sent_to_an_address_of_the_clients():
    answer = here(app([Reward("bright", bright)])).get("/health/", follow_redirects=False)
    assert (answer.status_code, "location" in answer.headers) == (404, False)


def test_half_a_character_in_a_fault_is_written_out():
    def complaining(images, prompts):
        raise ValueError(f"what is {prompts[0]}")

    body = tensors(torch.rand(2, 3, 4, 4), prompts='["\\ud800", "b"]')
    client = here(app([Reward("bright", complaining)]))
    answer = client.post("/bright", content=body, headers={"Content-Type": CONTENT_TYPE})
    assert (answer.status_code, answer.json()["error"][-14:]) == (422, "what is \\ud800")


# The command.


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["shape"], "there is no reward 'shape', did you mean 'shapes'"),
        (["shapes", "shapes"], "'shapes' needs another name"),
        (["{use: shapes, only: {task: ocr}}"], "shapes: only belongs into the config of the run"),
        (["{use: shapes, weight: 2}"], "shapes: weight belongs into the config of the run"),
        (["{use: shapes, weihgt: 2}"], "rewards.0.weihgt: unknown key, did you mean 'weight'"),
        (["shapes", "--host", "0.0.0.0"], "--host: 0.0.0.0 can be reached from other machines"),
        (["shapes", "--host", "0.0.0.0", "--token-env", "NOT_SET"], "--token-env: the environment variable NOT_SET is"),
        (["shapes", "--host", "192.0.2.1", "--token-env", "PATH"], "--host: cannot listen on 192.0.2.1"),
    ],
)
def test_what_cannot_be_served_is_refused(arguments, said, capsys):
    assert main(["serve", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_a_token_that_no_header_can_have_is_refused(capsys, monkeypatch):
    for token in ("secret\n", "sec\r\nret", "geheim\u00df", " "):
        monkeypatch.setenv("SERVED_TOKEN", token)
        assert main(["serve", "shapes", "--token-env", "SERVED_TOKEN"]) == 2
        assert "SERVED_TOKEN holds a character that no header can have" in capsys.readouterr().err


def test_a_port_in_use_is_refused(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["serve", "shapes", "--port", str(taken.getsockname()[1])]) == 2
    assert "--port: cannot listen on 127.0.0.1:" in capsys.readouterr().err


def test_a_server_with_a_token_lives_until_it_is_interrupted(monkeypatch):
    monkeypatch.setenv("SERVED_TOKEN", "secret")
    command = [sys.executable, "-m", "flowgrpo", "serve", "shapes", "--port", "0", "--token-env", "SERVED_TOKEN"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    url = process.stdout.readline().split()[1]
    with pytest.raises(RewardError, match="401: the token is missing or wrong"):
        rewards.load(url)
    assert rewards.load(url, options={"token_env": "SERVED_TOKEN"}).name == "shapes"
    with pytest.raises(RewardError, match="variable NOT_SET, which should hold the token"):
        rewards.load(url, options={"token_env": "NOT_SET"})
    process.send_signal(signal.SIGINT)
    assert process.wait(10) == 130
    assert "Traceback" not in process.stderr.read()
