"""Connections that are meant to hurt."""

import itertools
import socket
import time
from contextlib import suppress

import httpx2
import pytest
from serving import BODY, bright, health, serving

from rewards.served import guard, server
from rewards.served.wire import CONTENT_TYPE


def head(*lines):
    known = ["POST /bright HTTP/1.1", "Host: 127.0.0.1", f"Content-Type: {CONTENT_TYPE}"]
    return "\r\n".join([*known, *lines, "", ""]).encode()


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


RESTS = (b"no number\r\n", b"0\r\n" + b"x: y\r\n" * guard.HEAD, b"3\r\nabcd\r\n")
# The answer to HEAD has no body. The rest comes while the application answers, or after it has.
CASES = [*itertools.product((b"POST", b"HEAD"), RESTS, (0, 0.2))]
PLAIN = [(b"POST", RESTS[0], 0), (b"POST", RESTS[1], 0.2), (b"HEAD", RESTS[2], 0), (b"HEAD", RESTS[0], 0.2)]


@pytest.mark.parametrize(
    ("method", "rest", "pause"), [pytest.param(*c, marks=[pytest.mark.zoo] * (c not in PLAIN)) for c in CASES]
)
def test_a_body_that_is_no_http_ends_its_connection_in_silence(method, rest, pause, caplog):
    with serving(bright) as address, socket.create_connection(address) as sock:
        begun = head("Transfer-Encoding: chunked")
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
            while time.monotonic() < started + 60:
                sock.sendall(b"x")
                time.sleep(0.02)
        assert time.monotonic() - started > 0.2
        assert health(address)[1]["refused"] == {"late": 1}


def test_a_body_that_drips_is_waited_for_in_vain(monkeypatch):
    monkeypatch.setattr(server, "ARRIVAL", 0.3)
    with serving(bright) as address, socket.create_connection(address, 3) as sock:
        sock.sendall(head(f"Content-Length: {len(BODY)}") + BODY[:-1])
        assert sock.recv(100).startswith(b"HTTP/1.1 408")
