"""Requests to a reward server in another process: each is answered in HTTP, with a number or a sentence, or ends in silence
where it was no whole request; and the server lives on, as large as it was.
"""

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import h11
import psutil
import torch

from fuzzing.requests import CASES, GOOD, TOKEN, Case
from fuzzing.runner import LONGEST, Summary, is_sentence, run
from rewards.served.wire import CONTENT_TYPE, encode

STATUSES = {200, 400, 401, 404, 405, 411, 413, 415, 421, 422}  # and 500, of what a plug-in raised
MOST_GROWTH = 150 << 20  # bytes of memory of the server
PAUSE = 0.03  # seconds after which half a request ends, its answer having had the time to come
ROOT = Path(__file__).parents[2]
BODY = b"".join(encode(torch.full((2, 3, 4, 4), 0.75), ["a", "b"], {}, "float32"))
NUMBERS = (
    f"POST /bright HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\nContent-Type: {CONTENT_TYPE}\r\n"
    f"Content-Length: {len(BODY)}\r\n\r\n".encode()
    + BODY
)
SILENCE = "the connection ended in silence"


def fuzz(seed: int, count: int) -> Summary:
    """Send `count` requests; the server's own end, growth and output are failures too."""
    with serving() as (ports, process, output):
        for guarded in (False, True):
            lives(ports, guarded)
        before = process.memory_info().rss
        found = run("server", CASES, lambda case: attempt(ports, case), seed, count)
        failures = [*found.failures]
        for guarded in (False, True):
            try:
                lives(ports, guarded)
            except (AssertionError, OSError) as error:
                failures.append(f"afterwards: {type(error).__name__}: {error}")
        if process.is_running() and (grown := process.memory_info().rss - before) > MOST_GROWTH:
            failures.append(f"the server grew by {grown >> 20} MiB")
        traces = output.read_text().split("Traceback (")[1:]
        known = re.compile("^(RuntimeError: |ValueError: refused )on purpose", re.M)
        failures += [f"a traceback: {each[:3000]}" for each in traces if not known.search(each)]
    return replace(found, failures=tuple(failures))


@contextmanager
def serving() -> Iterator[tuple[tuple[int, int], psutil.Process, Path]]:
    """Yield the ports without and with a token, the process, and the file of its output."""
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "output").open("w") as output:
        paths = os.pathsep.join((str(ROOT), str(ROOT / "tests")))
        process = subprocess.Popen(
            [sys.executable, "-m", "fuzzing.served"], env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE, stderr=output, text=True,
        )  # fmt: skip
        try:
            ports = int(process.stdout.readline()), int(process.stdout.readline())
            yield ports, psutil.Process(process.pid), Path(output.name)
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


def lives(ports: tuple[int, int], guarded: bool) -> None:
    """Check that /health answers and a good request gets its numbers."""
    assert attempt(ports, Case(guarded, (GOOD,), 1, False, None, None)) is None
    assert attempt(ports, Case(guarded, (NUMBERS,), 1, False, "bright", (0.75, 0.75))) is None


def attempt(ports: tuple[int, int], case: Case) -> str | None:
    """Return None where all requests are answered with 200, else the first refusal; fail on any other answer."""
    answers = received(ports[case.guarded], case)
    said = None
    for status, body in answers:
        raised = status in (422, 500) and case.name in ("broken", "stubborn")
        assert status in STATUSES or raised, f"status {status}: {body[:300]!r}"
        if case.headless:
            said = said or (None if status == 200 else f"status {status}")
        elif status != 200:
            sentence = body.decode() if body.startswith(b"Invalid HTTP") else json.loads(body)["error"]
            assert is_sentence(sentence), f"no short sentence of one line: {sentence[:300]!r}"
            said = said or sentence
        elif case.name == "bright":
            rewards = json.loads(body)["rewards"]
            assert case.rewards is None or rewards == list(case.rewards), f"{rewards}, not {case.rewards}"
    return said if answers else SILENCE


def received(port: int, case: Case) -> list[tuple[int, bytes]]:
    """Return the status and body of each answer; fail where they are no HTTP, too few or too slow."""
    data, until, reset = bytearray(), time.monotonic() + LONGEST, False
    with socket.create_connection(("127.0.0.1", port), LONGEST) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with suppress(ConnectionError):  # refused before it was read
            for piece in case.pieces:
                sock.sendall(piece)
        if not case.answers:
            sock.settimeout(PAUSE)
        while not case.answers or len(parsed(bytes(data), case.headless)[0]) < case.answers:
            try:
                part = sock.recv(1 << 16)
            except TimeoutError:
                assert not case.answers, f"no answer: {bytes(data[:300])!r}"
                assert time.monotonic() < until, f"no end of the connection: {bytes(data[:300])!r}"
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_WR)
                continue
            except ConnectionError:  # closed with something unread, by which the end of an answer may be lost
                reset = True
                break
            if not part:
                break
            data += part
    answers, rest = parsed(bytes(data), case.headless, ended=not case.answers and not reset)
    assert not rest or reset, f"no HTTP: {rest[:300]!r}"
    assert answers or not case.answers, "no answer to a whole request"
    return answers


def parsed(data: bytes, headless: bool, ended: bool = False) -> tuple[list[tuple[int, bytes]], bytes]:
    """Split whole answers from the rest, leaving out those that announce another one (100)."""
    answers = []
    while data := re.sub(rb"^(HTTP/1\.1 1\d\d [ -~]*\r\n\r\n)+", b"", data):
        client = h11.Connection(h11.CLIENT)
        client.send(h11.Request(method="HEAD" if headless else "GET", target="/", headers=[("Host", "localhost")]))
        client.send(h11.EndOfMessage())
        client.receive_data(data)
        if ended:
            client.receive_data(b"")
        status, body = 0, b""
        while not isinstance(event := client.next_event(), h11.EndOfMessage):
            if event is h11.NEED_DATA or event is h11.PAUSED:
                return answers, data
            if isinstance(event, h11.Data):
                body += event.data
            elif isinstance(event, h11.Response):
                status = event.status_code
        answers.append((status, body))
        data = client.trailing_data[0]
    return answers, data
