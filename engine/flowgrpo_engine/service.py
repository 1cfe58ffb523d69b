"""Requests to one engine, or to several that take turns, with time limits; and JSON answers."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

from flowgrpo.errors import InputError
from flowgrpo.schema.engine import Engine
from flowgrpo.schema.sections import RunConfig
from rewards.base import RewardError
from rewards.served.endpoint import Endpoint

KEY = "run.engine"
INSTEAD = f"or set {KEY}=null"

GREETING = 20.0  # seconds in which an engine must answer before a run begins

T = TypeVar("T")
Request = TypeVar("Request")


class Service:
    """HTTP client of the engines of a run.

    Args:
        section: `run.engine`.

    Attributes:
        urls: addresses of the engines.

    Raises:
        InputError: an address is not valid, or the variable with the key is not set.
    """

    def __init__(self, section: Engine):
        try:
            self._endpoint = Endpoint(section.url, section.timeout, section.retries, section.token_env)
        except RewardError as error:
            raise InputError(f"{KEY}.{'url' if 'address' in str(error) else 'token_env'}: {error}") from None
        self.urls, self._requests = self._endpoint.urls, section.requests

    def place(self, path: str) -> str:
        """Return the addresses with a path, for errors."""
        return f"{' or '.join(self.urls)} at {path}"

    def greet(self, ask: Callable[[str, float], object]) -> None:
        """Call `ask(url, deadline)` for each engine, before anything expensive happens.

        Raises:
            InputError: an engine does not answer, or answers something else.
        """
        for url in self.urls:
            try:
                ask(url, time.monotonic() + GREETING)
            except EngineError as error:
                raise InputError(f"{KEY}.url: {error}") from None

    def together(self, ask: Callable[[Request], T], requests: Sequence[Request]) -> list[T]:
        """Return the result of `ask` for each request; several requests run at once, and the first error ends all.

        Raises:
            EngineError: `ask` raised it.
        """
        with ThreadPoolExecutor(self._requests, "rollouts") as pool:
            jobs = [pool.submit(ask, request) for request in requests]
            try:
                return [job.result() for job in jobs]
            except EngineError:
                pool.shutdown(cancel_futures=True)
                raise

    def ask(self, method: str, path: str, **content: Any) -> bytes:
        """Return the content of an answer; options as of `Endpoint.ask`.

        Raises:
            EngineError: there was no answer, or its status is an error.
        """
        try:
            return self._endpoint.ask(method, path, **content).content
        except RewardError as error:
            raise EngineError(str(error)) from None

    def json(self, url: str, method: str, path: str, **content: Any) -> dict[str, Any]:
        """Return the JSON object that one engine answers.

        Raises:
            EngineError: the answer is something else.
        """
        answer = parse(self.ask(method, path, only=url, **content))
        if not isinstance(answer, dict):
            raise EngineError(f"{url}{path} did not answer with a JSON object")
        return answer


def parse(content: bytes) -> Any:
    """Return the value of a JSON text; None if it is not JSON."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return None


class EngineError(Exception):
    """An engine did not answer, or did not do what was requested; the message is one sentence."""


@contextmanager
def naming(place: str) -> Iterator[None]:
    """Prefix the message of an EngineError with the place of the answer."""
    try:
        yield
    except EngineError as error:
        raise EngineError(f"{place} {error}") from None


def check(config: RunConfig) -> None:
    """Refuse a run whose weights are not one set of adapters that every process holds in full.

    Raises:
        InputError: the sentence says what to set instead.
    """
    run = config.run
    for key, value in (("run.generators", run.generators), ("run.staleness", run.staleness)):
        if value:
            raise InputError(f"{key}: an engine always samples with the current weights; set it to 0, {INSTEAD}")
    if run.sharding != "none":
        raise InputError(
            f"run.sharding: an engine gets adapters from whole networks, not from shards; set it to none, {INSTEAD}"
        )
    if config.model.lora is None:
        raise InputError(f"model.lora: an engine gets adapters, not whole networks; give it a rank, {INSTEAD}")
