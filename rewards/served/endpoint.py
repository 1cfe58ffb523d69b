"""Requests to an HTTP service: replicas, a time limit, retries with exponential back-off, a token."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import re
import threading
import time
from collections.abc import Sequence
from functools import cache
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

import httpx2 as httpx

from rewards.base import NoAnswer, RewardError

PASSING = (408, 429, 500, 502, 503, 504)  # statuses worth a retry
FIRST_PAUSE = 0.5  # seconds before the second round; doubles each round
REST = 30.0  # seconds after a failure in which a replica is asked last
MOST_BYTES = 8 << 20  # of an answer; parsed JSON may take forty times as much


class Endpoint:
    """A service behind one or more replicas.

    Requests go to the replicas in turn. If one fails, the request goes to the other replicas, and after a pause to all of
    them again. A status that blames the request itself is not retried.

    Args:
        urls: of the replicas, without the path of a request.
        timeout: seconds per request with all its tries; replicas share what is left.
        retries: further rounds after the first.
        token_env: name of the environment variable with the bearer token, if any.
    """

    def __init__(self, urls: Sequence[str], timeout: float, retries: int, token_env: str | None = None):
        self.urls = [url.strip().rstrip("/") for url in urls]
        for url in self.urls:
            if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
                raise RewardError(f"{url!r} is not an address such as http://127.0.0.1:8100")
        headers = {"Accept-Encoding": "identity"}  # a compressed answer may have any size
        if token_env is not None:
            token, variable = os.environ.get(token_env), f"the environment variable {token_env}"
            if not token:
                raise RewardError(f"{variable}, which should hold the token of {urls[0]}, is not set")
            if not re.fullmatch("[!-~]+", token):
                raise RewardError(f"{variable} holds no token: it has a space, a line break or a sign beyond ASCII")
            headers["Authorization"] = f"Bearer {token}"
        self.timeout, self.retries = timeout, retries
        local = all(is_loopback(urlsplit(url).hostname or "") for url in self.urls)
        encrypted = any(urlsplit(url).scheme == "https" for url in self.urls)  # reading certificates takes 30 ms
        # addresses of this machine need no proxy
        self._http = httpx.AsyncClient(headers=headers, verify=encrypted, trust_env=not local)
        self._loop = _loop()
        self._turns = itertools.count()
        self._failed_at: dict[str, float] = {}

    def ask(
        self,
        method: str,
        path: str,
        only: str | None = None,
        deadline: float | None = None,
        *,
        most_bytes: int | None = None,
        **content: Any,
    ) -> httpx.Response:
        """Return the answer to one request; thread-safe.

        Args:
            only: the one replica to ask.
            deadline: in `time.monotonic`; by default `timeout` from now.
            content: arguments of httpx for the request (`content`, `json`, `headers`).

        Raises:
            NoAnswer: no replica answered in time.
            RewardError: the status of the answer is no success, or it has more than `most_bytes` (default `MOST_BYTES`).
        """
        deadline = time.monotonic() + self.timeout if deadline is None else deadline
        most_bytes = MOST_BYTES if most_bytes is None else most_bytes
        problem = f"{only or self.urls[0]}{path} was not asked any more, after {self.timeout:.3g} s"
        answered = False
        for round_ in range(1 + self.retries):
            if round_:
                time.sleep(max(0.0, min(FIRST_PAUSE * 2 ** (round_ - 1), deadline - time.monotonic())))
            urls = [only] if only else self._in_turn()
            for i, url in enumerate(urls):
                left = (deadline - time.monotonic()) / (len(urls) - i)
                if left <= 0:
                    break
                try:
                    coroutine = self._answer(method, url + path, left, most_bytes, **content)
                    response = asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()
                except TimeoutError:
                    problem = f"{url}{path} did not answer within {left:.3g} s"
                except httpx.RequestError as error:
                    problem = f"{url}{path} could not be reached ({_reason(error)}); check that its server runs"
                else:
                    if response.is_success:
                        self._failed_at.pop(url, None)
                        return response
                    answered = True
                    problem = f"{url}{path} answered {response.status_code}: {_complaint(response)}"
                    if response.status_code not in PASSING:
                        raise RewardError(problem)
                self._failed_at[url] = time.monotonic()
        raise RewardError(problem) if answered else NoAnswer(problem)

    async def _answer(self, method: str, url: str, seconds: float, most_bytes: int, **content: Any) -> httpx.Response:
        """Return a whole answer within `seconds`. The event loop limits the total time; httpx would limit each read."""
        body = bytearray()
        async with asyncio.timeout(seconds), self._http.stream(method, url, timeout=None, **content) as response:
            async for part in response.aiter_raw():
                body += part
                if len(body) > most_bytes:
                    raise RewardError(f"{url} answered with more than {most_bytes} bytes")
        return httpx.Response(response.status_code, content=bytes(body), request=response.request)

    def _in_turn(self) -> list[str]:
        """Return all replicas from the next on; those that failed recently come last."""
        start = next(self._turns) % len(self.urls)
        long_ago = time.monotonic() - REST
        resting = {url: self._failed_at.get(url, long_ago) > long_ago for url in self.urls}
        return sorted(self.urls[start:] + self.urls[:start], key=resting.__getitem__)


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """Return an event loop that runs in its own thread as long as this process."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="requests", daemon=True).start()
    return loop


def is_loopback(host: str) -> bool:
    """Return whether a host name or address can be reached from this machine only."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _reason(error: BaseException) -> str:
    """Return why a request was not answered: the innermost cause of a failed connection."""
    if isinstance(error, httpx.ConnectError):
        while (
            below := error.exceptions[0] if isinstance(error, ExceptionGroup) else error.__cause__ or error.__context__
        ):
            error = below
    if isinstance(error, OSError) and error.errno is not None and error.errno in errno.errorcode:
        return os.strerror(error.errno)
    return str(error) or type(error).__name__


def _complaint(response: httpx.Response) -> str:
    """Return the reason in a failed answer: our `error`, OpenAI's `error.message`, or the beginning of its text."""
    try:
        reason = response.json()
        reason = reason.get("error") or reason.get("message") or reason
        reason = reason.get("message", reason) if isinstance(reason, dict) else reason
    except (ValueError, AttributeError, RecursionError):
        reason = response.text
    return " ".join(str(reason).split())[:300] or response.reason_phrase
