import itertools
import re
import socket
import threading
import time
from contextlib import contextmanager, suppress

import pytest
import torch
from fakes import http_server
from runs import serving

import rewards
from flowgrpo.data.prompts import Row
from flowgrpo.training.scoring.scorer import score
from rewards import RewardError
from rewards.served import client, endpoint
from rewards.served.wire import as_floats, decode

TWO = torch.tensor([0.25, 0.5]).view(2, 1, 1, 1).expand(2, 3, 8, 8)


def server(answer, group_wise=False, columns=None, max_bytes=1 << 20):
    """A server of `bright` that answers its requests as `answer` says."""
    health = {"rewards": {"bright": {"group_wise": group_wise, "columns": columns}}, "max_bytes": max_bytes}
    return http_server(lambda asked: health if asked.path == "/health" else answer(asked))


def bright(*urls, **options):
    return rewards.load(",".join(f"{url}/bright" for url in urls), options=options)


def honest(asked):
    return {"rewards": as_floats(decode(bytearray(asked.body)).samples).mean((1, 2, 3)).tolist()}


def slow(asked):
    time.sleep(20)
    return honest(asked)


def counted(answer):
    """An answer, and the batch sizes it was asked for."""
    sizes = []

    def counting(asked):
        sizes.append(len(decode(bytearray(asked.body)).prompts))
        return answer(asked)

    return counting, sizes


def test_numbers_and_columns_that_are_wanted_travel():
    seen = []

    def answer(asked):
        seen.append(decode(bytearray(asked.body)))
        return honest(asked)

    with server(answer, columns=["n"]) as url:
        reward = rewards.load(f"{url}/bright", weight=0.5)
        assert (reward.name, reward.weight, reward.group_wise) == ("bright", 0.5, False)
        assert reward(TWO, ["a", "b"], {"n": [1, None], "other": [2, 2]}).tolist() == [0.25, 0.5]
    (batch,) = seen
    assert batch.samples.equal(TWO)
    assert (batch.prompts, batch.columns) == (["a", "b"], {"n": [1, None]})


def test_uint8_on_request_rounds_to_256_levels():
    with server(honest) as url:
        assert bright(url, transport="uint8")(TWO, ["a", "b"], {}).tolist() == pytest.approx([64 / 255, 128 / 255])


FAILED = "the reward 'bright' failed: ValueError: no"


@pytest.mark.parametrize(("answer", "said"), [
    (b"<html>garbage</html>", "answered with no rewards: '<html>garbage</html>'"),
    ([1.0, 2.0], "answered with no rewards"), (b"[" * 100_000, "answered with no rewards"),
    ({"rewards": [1.0]}, "answered with 1 rewards for 2 samples"),
    ({"rewards": [1.0, 2.0, 3.0]}, "answered with 3 rewards for 2 samples"),
    ({"rewards": 1.0}, "answered with float for 2 samples"), ({"rewards": ["x", 1.0]}, "returned str for sample 0"),
    ((422, {"error": FAILED}), f"422: {FAILED}"), ((418, b""), "answered 418"),
])  # fmt: skip
def test_an_answer_that_is_none_is_one_clear_sentence_at_once(answer, said):
    counting, sizes = counted(lambda asked: answer)
    with server(counting) as url, pytest.raises(RewardError, match=said):
        bright(url)(TWO, ["a", "b"], {})
    assert sizes == [2]  # and is not asked for again


def test_what_is_not_finite_loses_its_sample_and_null_is_not_applicable():
    for written in ("NaN", float("nan"), float("inf")):
        with server(lambda asked, written=written: {"rewards": [written, None]}) as url:
            first, second = bright(url)(TWO, ["a", "b"], {})
            assert first.isinf()
            assert second.isnan()
            with pytest.raises(RewardError, match="returned NaN or infinity for a synthetic sample"):
                bright(url).check(TWO[0], "a", {})


def test_a_passing_failure_is_tried_again_after_growing_pauses(monkeypatch):
    times = []

    def answer(asked):
        times.append(time.monotonic())
        return honest(asked) if len(times) > 2 else ([503, 500][len(times) - 1], {"error": "out of memory"})

    monkeypatch.setattr(endpoint, "FIRST_PAUSE", 0.1)
    with server(answer) as url:
        assert bright(url)(TWO, ["a", "b"], {}).tolist() == [0.25, 0.5]
    first, second = (later - earlier for earlier, later in itertools.pairwise(times))
    assert first >= 0.1
    assert second >= 0.2


@contextmanager
def dripping(begun):
    """A server that says something at once and then a byte every 0.1 s, for ever."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve():
            with suppress(OSError):
                sock, _ = listening.accept()
                with sock:
                    sock.sendall(begun)
                    while True:
                        sock.sendall(b"x")
                        time.sleep(0.1)

        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


@pytest.mark.parametrize("begun", ["", "X: ", "\r\n", "Content-Length: 90\r\n\r\n"])
def test_the_timeout_is_that_of_the_whole_answer(begun):
    with dripping(f"HTTP/1.1 200 OK\r\n{begun}".encode() if begun else b"") as url:
        started = time.monotonic()
        with pytest.raises(RewardError, match=r"/health did not answer within 0\.\d+ s"):
            bright(url, timeout=0.3)
        assert time.monotonic() - started > 0.2


def test_the_timeout_is_that_of_all_parts_of_a_batch():
    def unhurried(asked):
        time.sleep(0.1)
        return honest(asked)

    counting, sizes = counted(unhurried)
    said = pytest.raises(RewardError, match="did not answer within|was not asked any more, after 0.4 s")
    with server(counting, max_bytes=1200) as url, said:  # one sample of 768 bytes each
        bright(url, timeout=0.4)(torch.rand(8, 3, 8, 8), ["a"] * 8, {})
    assert 1 <= len(sizes) <= 4  # not each of the eight


def test_an_answer_without_end_is_not_read(monkeypatch):
    monkeypatch.setattr(endpoint, "MOST_BYTES", 1000)
    asked = []

    def endless(request):
        asked.append(request.headers["accept-encoding"])
        return b"[" * 2000

    with server(endless) as url, pytest.raises(RewardError, match="/bright answered with more than 1000 bytes"):
        bright(url)(TWO, ["a", "b"], {})
    assert asked == ["identity"]  # once, and nothing that is small only on its way


def test_texts_beyond_what_a_header_holds_are_cut_too(monkeypatch):
    monkeypatch.setattr(client, "MOST_HEADER", 250)
    answer, sizes = counted(lambda asked: {"rewards": [len(t) for t in decode(bytearray(asked.body)).samples]})
    texts = ["x" * n for n in (60, 50, 40, 30)]
    with server(answer) as url:
        assert bright(url)(texts, ["a"] * 4, {}).tolist() == [60, 50, 40, 30]
        with pytest.raises(RewardError, match="takes 250 bytes of prompts, columns and texts at most, not .* of 1 sa"):
            bright(url)(["x" * 300], ["a"], {})
    assert sizes == [2, 2]


def test_a_killed_server_costs_its_samples_and_not_the_run(tmp_path, caplog):
    (tmp_path / "mine.py").write_text(
        "import time\ndef late(images, prompts):\n    time.sleep(60 * (prompts[0] == 'hang'))\n"
        "    return [1.0] * len(prompts)\n"
    )
    with serving("./mine.py:late", folder=tmp_path) as (_, urls):
        reward = rewards.load(urls["late"], options={"timeout": 1, "retries": 0})
        rows = [Row("a", 0), Row("a", 1)]
        assert score([reward], TWO, rows).values.flatten().tolist() == [1.0, 1.0]
        with pytest.raises(RewardError, match=r"did not answer within (1|0\.\d+) s"):  # it hangs in the reward
            reward(TWO, ["hang", "hang"], {})
    with pytest.raises(RewardError, match=r"/late could not be reached \(.*refused\)"):
        reward(TWO, ["a", "b"], {})
    assert score([reward], TWO, rows).lost.all()
    assert re.search(r"failed \(NoAnswer: .*refused.*; its 2 samples are dropped", caplog.text)


def test_replicas_share_a_batch():
    first, asked_first = counted(honest)
    second, asked_second = counted(honest)
    samples = torch.linspace(0, 1, 5).view(5, 1, 1, 1).expand(5, 3, 4, 4)
    with server(first) as one, server(second) as two:
        for use, options in ((f"{one}/bright,{two}/bright", {}), (f"{one}/bright", {"replicas": [f"{two}/bright"]})):
            reward = rewards.load(use, options=options)
            assert reward.name == "bright"
            values = reward(samples, list("abcde"), {"n": list(range(5))})
            assert values.tolist() == pytest.approx([0, 0.25, 0.5, 0.75, 1])
    assert sorted(asked_first + asked_second) == [2, 2, 3, 3]
    assert sorted(map(len, (asked_first, asked_second))) == [2, 2]


def test_a_replica_that_fails_is_stood_in_for_and_then_left_alone():
    broken, asked_broken = counted(lambda asked: (503, {"error": "out of memory"}))
    hanging, asked_hanging = counted(slow)
    for bad, asked_bad in ((broken, asked_broken), (hanging, asked_hanging)):
        with server(bad) as one, server(honest) as two:
            reward = bright(one, two, timeout=1.0)
            for _ in range(3):
                assert reward(TWO, ["a", "b"], {}).tolist() == [0.25, 0.5]
        assert asked_bad == [1]  # once; then it rests


def test_a_group_goes_to_one_replica_whole():
    answer, sizes = counted(honest)
    with server(answer, group_wise=True) as one, server(answer, group_wise=True) as two:
        bright(one, two)(TWO, ["a", "b"], {})
    assert sizes == [2]


def test_a_batch_larger_than_the_server_takes_is_cut_and_a_group_is_refused():
    answer, sizes = counted(honest)
    samples = torch.rand(8, 3, 16, 16)  # 3072 bytes each
    with server(answer, max_bytes=8000) as url:
        values = bright(url)(samples, ["a"] * 8, {"n": list(range(8))})
        torch.testing.assert_close(values.float(), samples.mean((1, 2, 3)))
    assert sizes == [2, 2, 2, 2]
    said = "bright takes 8000 bytes at most, not the .* of 8 samples: use the option transport"
    with server(answer, group_wise=True, max_bytes=8000) as url, pytest.raises(RewardError, match=said):
        bright(url)(samples, ["a"] * 8, {})


def test_a_column_that_json_cannot_hold_is_named():
    with server(honest) as url, pytest.raises(ValueError, match="the column 'mask' cannot travel as JSON"):
        bright(url)(TWO, ["a", "b"], {"mask": [torch.ones(1), torch.ones(1)]})


@pytest.mark.parametrize(("path", "options", "said"), [
    ("", {}, "names no reward, write http://127.0.0.1:.*/NAME"),
    ("/brigt", {}, "serves no reward 'brigt', did you mean 'bright'"),
    ("/bright", {"transport": "jpeg"}, "transport: there is no 'jpeg', choose one of float32, uint8"),
    ("/bright", {"timeot": 3}, "has no option 'timeot', did you mean 'timeout'"),
    ("/bright,ftp://x/bright", {}, "'ftp://x' is not an address"),
    ("/bright,http://127.0.0.1:9/bright", {"timeout": 0.2}, "http://127.0.0.1:9/health could not be reached"),
])  # fmt: skip
def test_a_url_that_leads_nowhere_is_refused_at_once(path, options, said):
    with server(honest) as url, pytest.raises(RewardError, match=said):
        rewards.load(url + path, options=options)


@pytest.mark.parametrize("wrong", [
    None, {"group_wise": "no"}, {"columns": "abc"}, {"columns": [1]}, {"max_bytes": "9"}, {"max_bytes": None}
])  # fmt: skip
def test_what_has_no_card_of_a_reward_server_is_none(wrong):
    some = http_server(lambda asked: {"hello": "world"}) if wrong is None else server(honest, **wrong)
    with some as url, pytest.raises(RewardError, match="is not a reward server"):
        bright(url)


def test_replicas_that_differ_are_refused():
    with server(honest) as one, server(honest, group_wise=True) as two:
        with pytest.raises(RewardError, match="serve different rewards"):
            bright(one, two)
        assert bright(two).group_wise


@pytest.mark.parametrize("token", ["secret\n", "sec ret", "s\x01ecret", "secrét"])
def test_a_token_that_no_header_can_carry_is_refused_and_not_shown(monkeypatch, token):
    monkeypatch.setenv("TOKEN", token)
    with pytest.raises(RewardError, match="environment variable TOKEN holds no token") as caught:
        rewards.load("http://127.0.0.1:1/bright", options={"token_env": "TOKEN", "retries": 0})
    assert not any(part in str(caught.value) for part in ("sec", "cret", "\x01"))


@pytest.mark.parametrize(("urls", "checked"), [
    (["https://here.test/a"], True), (["http://127.0.0.1:1", "HTTPS://there.test"], True),
    (["http://there.test", "http://localhost:1"], False),
])  # fmt: skip
def test_certificates_are_checked_wherever_an_address_is_encrypted(urls, checked, monkeypatch):
    asked, made = [], endpoint.httpx.AsyncClient
    monkeypatch.setattr(endpoint.httpx, "AsyncClient", lambda **options: asked.append(options) or made(**options))
    assert not endpoint.Endpoint(urls, timeout=1, retries=0)._http.follow_redirects
    assert [options["verify"] for options in asked] == [checked]
