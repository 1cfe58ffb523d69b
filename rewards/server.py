"""The reward server behind `flowgrpo serve`: rewards over HTTP, for runs in other environments or on other machines.

    POST /NAME     a request of `rewards.wire` -> {"rewards": [...]}: a number each, null (not applicable) or "NaN"
    GET /health    {"rewards": {NAME: {"group_wise": ..., "columns": [...] or null}}, "max_bytes": ..., "shared": ...}
    GET /metrics   counters as Prometheus reads them

A request lies in the body, or in memory that the client names in a header (`rewards.memory`); `shared` says of memory named
there whether it can be read here.
A fault is {"error": "one sentence"}: 422 for a request that is no batch, or one that the reward refuses with a ValueError;
500 where it failed otherwise, and may be asked again; 401, 404, 405, 413, 415.
A reward is called in one thread; requests that wait for it meanwhile are joined into one call.
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import logging
import math
import os
import re
import socket
import time
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from rewards import memory
from rewards.base import Reward, RewardError, nearest
from rewards.endpoint import is_loopback
from rewards.heap import keep_freed_memory
from rewards.wire import CONTENT_TYPE, NOT_FINITE, Batch, decode

KEEP_ALIVE = 75  # seconds that an idle connection stays open: longer than clients keep theirs
log = logging.getLogger(__name__)


def app(
    rewards: Sequence[Reward],
    token: str | None = None,
    batch_size: int = 64,
    max_bytes: int = 256 << 20,
    device: torch.device | str = "cpu",
) -> ASGIApp:
    """The ASGI application.

    Args:
        token: that every request must bear, if any.
        batch_size: samples up to which waiting requests are joined; one request is never cut.
        max_bytes: largest body of a request.
        device: where rewards receive their samples.

    Raises:
        RewardError: a reward's name cannot stand in a URL, or stands twice.
    """
    lanes: dict[str, _Lane] = {}
    for reward in rewards:
        if not re.fullmatch(r"\w[\w.-]*", reward.name) or reward.name in ("health", "metrics", *lanes):
            raise RewardError(
                f"the reward {reward.name!r} needs another name to be served: letters, digits, '.', '_' and '-', none "
                "twice, not health or metrics"
            )
        lanes[reward.name] = _Lane(reward, batch_size, device)

    async def score(request: Request) -> JSONResponse:
        lane = _found(lanes, request.path_params["name"])
        if request.headers.get("content-type") != CONTENT_TYPE:
            raise HTTPException(415, f"the content type must be {CONTENT_TYPE}")
        place = request.headers.get(memory.HEADER)
        try:
            batch = decode(await _body(request, max_bytes) if place is None else memory.read(place, max_bytes))
        except ValueError as error:
            raise HTTPException(422, str(error)) from None
        return JSONResponse({"rewards": await lane.score(batch, request)})

    async def health(request: Request) -> JSONResponse:
        cards = {k: {"group_wise": lane.reward.group_wise, "columns": lane.reward.takes} for k, lane in lanes.items()}
        shared = _reads(request.headers.get(memory.HEADER, ""))
        return JSONResponse({"rewards": cards, "max_bytes": max_bytes, "shared": shared})

    async def metrics(request: Request) -> PlainTextResponse:
        return PlainTextResponse("".join(f"{line}\n" for lane in lanes.values() for line in lane.metrics()))

    async def fault(request: Request, error: HTTPException) -> JSONResponse:
        return JSONResponse({"error": error.detail}, error.status_code, error.headers)

    routes = [Route("/health", health), Route("/metrics", metrics), Route("/{name}", score, methods=["POST"])]
    application = Starlette(routes=routes, exception_handlers={HTTPException: fault})
    return application if token is None else _guarded(application, token)


def listen(host: str, port: int, token: str | None) -> socket.socket:
    """A socket that listens there.

    Raises:
        RewardError: the address can be reached from other machines and no token is asked for, or it cannot be had.
    """
    if token is None and not is_loopback(host):
        raise RewardError(
            f"--host: {host} can be reached from other machines, so name a variable with a token, --token-env NAME"
        )
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listening = socket.create_server((host, port), family=family)
    except OSError as error:
        option = "--port" if error.errno in (errno.EADDRINUSE, errno.EACCES) else "--host"
        raise RewardError(f"{option}: cannot listen on {host}:{port} ({error.strerror})") from None
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # else each answer waits 40 ms for a delayed ACK
    return listening


def token_of(variable: str) -> str:
    """The token in an environment variable.

    Raises:
        RewardError: there is none.
    """
    if not os.environ.get(variable):
        raise RewardError(f"--token-env: the environment variable {variable} is not set")
    return os.environ[variable]


def run(application: ASGIApp, listening: socket.socket) -> None:
    """Serve until interrupted."""
    keep_freed_memory()
    settings = uvicorn.Config(
        application, log_level="warning", access_log=False, lifespan="off", timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=5, ws="none",
    )  # fmt: skip
    uvicorn.Server(settings).run(sockets=[listening])


@dataclass(eq=False)
class _Call:
    """One request for a reward, and in the end what came of it."""

    batch: Batch
    outcome: list[float | str | None] | Exception | None = None


class _Lane:
    """One reward and the requests that wait for it."""

    def __init__(self, reward: Reward, batch_size: int, device: torch.device | str):
        self.reward, self.batch_size, self.device = reward, batch_size, device
        self.waiting: deque[_Call] = deque()
        self.free, self.thread = asyncio.Lock(), ThreadPoolExecutor(1)
        self.counted: Counter[str] = Counter()

    async def score(self, batch: Batch, request: Request) -> list[float | str | None]:
        """The rewards of one request, which waits for its turn unless it is joined with another's.

        Raises:
            HTTPException: the reward failed, or the client did not wait.
        """
        call = _Call(batch)
        self.waiting.append(call)
        self.counted["requests"] += 1
        waits = self.free.locked()
        async with self.free:
            if waits and call.outcome is None and await request.is_disconnected():  # who gave up may have asked again
                self.waiting.remove(call)
                raise HTTPException(400, "the client left before its turn")
            while call.outcome is None:
                await asyncio.get_running_loop().run_in_executor(self.thread, self._settle, self._next())
        if isinstance(call.outcome, Exception):
            self.counted["failures"] += 1
            problem = f"{type(call.outcome).__name__}: {' '.join(str(call.outcome).split())}"
            status = 422 if isinstance(call.outcome, ValueError) else 500
            raise HTTPException(status, f"the reward {self.reward.name!r} failed: {problem}")
        return call.outcome

    def _next(self) -> list[_Call]:
        """The request that waits longest, and those after it that fit into one call with it."""
        joined = [self.waiting.popleft()]
        size = len(joined[0].batch.prompts)
        while self.waiting and self._fits(joined[0].batch, self.waiting[0].batch, size):
            joined.append(self.waiting.popleft())
            size += len(joined[-1].batch.prompts)
        return joined

    def _fits(self, first: Batch, other: Batch, size: int) -> bool:
        alike = _shape(first) == _shape(other) and first.columns.keys() == other.columns.keys()
        return not self.reward.group_wise and alike and size + len(other.prompts) <= self.batch_size

    def _settle(self, calls: Sequence[_Call]) -> None:
        """Give each of some requests its outcome; where they fail together, each is tried alone."""
        try:
            outcomes = self._scored([call.batch for call in calls])
        except Exception as error:  # a plug-in may raise anything; the server outlives it
            if len(calls) > 1:
                for call in calls:
                    self._settle([call])
                return
            log.warning("the reward %r failed", self.reward.name, exc_info=error)
            outcomes = [error]
        for call, outcome in zip(calls, outcomes, strict=True):
            call.outcome = outcome

    def _scored(self, batches: Sequence[Batch]) -> list[list[float | str | None]]:
        """The rewards of some batches, in one call."""
        started = time.perf_counter()
        try:
            with torch.no_grad():
                values = self.reward(
                    _joined([batch.samples for batch in batches], self.device),
                    [prompt for batch in batches for prompt in batch.prompts],
                    {name: [v for batch in batches for v in batch.columns[name]] for name in batches[0].columns},
                )
        finally:
            self.counted["calls"] += 1
            self.counted["seconds"] += time.perf_counter() - started
        self.counted["samples"] += len(values)
        return [
            [None if math.isnan(v) else v if math.isfinite(v) else NOT_FINITE for v in part.tolist()]
            for part in values.split([len(batch.prompts) for batch in batches])
        ]

    def metrics(self) -> list[str]:
        """Requests, failures, calls of the reward, samples and seconds in it so far, and requests that wait now."""
        label = f'{{reward="{self.reward.name}"}}'
        names = ("requests", "failures", "calls", "samples", "seconds")
        counters = [f"flowgrpo_{name}_total{label} {self.counted[name]:g}" for name in names]
        return [*counters, f"flowgrpo_waiting{label} {len(self.waiting)}"]


def _shape(batch: Batch) -> torch.Size | None:
    """Of one sample; None of texts."""
    return batch.samples.shape[1:] if isinstance(batch.samples, torch.Tensor) else None


def _joined(parts: Sequence[torch.Tensor | list[str]], device: torch.device | str) -> torch.Tensor | list[str]:
    if isinstance(parts[0], torch.Tensor):
        return (torch.cat(parts) if len(parts) > 1 else parts[0]).to(device)
    return [text for part in parts for text in part]


def _found(lanes: dict[str, _Lane], name: str) -> _Lane:
    if name not in lanes:
        raise HTTPException(404, f"there is no reward {name!r} here, {nearest(name, lanes)}")
    return lanes[name]


def _reads(place: str) -> bool:
    """Whether that memory can be read from here."""
    try:
        memory.read(place, 1)
    except ValueError:
        return False
    return True


async def _body(request: Request, most: int) -> bytearray:
    """The body of a request, refused as soon as it is known to be too large."""
    too_large = HTTPException(413, f"the body may have {most} bytes at most")
    announced = request.headers.get("content-length", "0")
    if announced.isdecimal() and int(announced) > most:
        raise too_large
    parts, size = [], 0
    try:
        async for part in request.stream():
            parts.append(part)
            size += len(part)
            if size > most:
                raise too_large
    except ClientDisconnect:
        raise HTTPException(400, "the client left before its request was complete") from None
    return bytearray().join(parts)


def _guarded(application: ASGIApp, token: str) -> ASGIApp:
    """An application that answers only requests with `Authorization: Bearer TOKEN`."""
    expected = f"Bearer {token}".encode()

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        given = dict(scope["headers"]).get(b"authorization", b"")
        if hmac.compare_digest(given, expected):
            await application(scope, receive, send)
        else:
            refusal = JSONResponse({"error": "the token is missing or wrong"}, 401, {"WWW-Authenticate": "Bearer"})
            await refusal(scope, receive, send)

    return guarded
