"""The reward server of `flowgrpo serve`: rewards over HTTP, for runs in other environments or on other machines.

    POST /NAME     a request of `rewards.served.wire` -> {"rewards": [...]}: a number each, null (not applicable) or "NaN"
    GET /health    {"rewards": {NAME: {"group_wise": ..., "columns": [...] or null, "waiting": ..., "busy": seconds}},
                   "max_bytes": ..., "refused": {STATUS: number}}; 503 while a reward does not return
    GET /metrics   counters in Prometheus format

An error is {"error": "one sentence"}: 422 for a malformed batch or a ValueError of the reward, 500 for its other failures,
and 400, 401, 403, 404, 405, 411, 413, 415, 421. A request with 408, 500 or 503 may be repeated. Each reward runs in one
thread. Waiting requests are joined into one call, and `ROOM` bounds their bytes.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import re
import socket
import time
import traceback
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass

import torch
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route

from rewards.base import Reward, RewardError, nearest, one_line
from rewards.memory import keep_freed_memory
from rewards.process_state import own_directory
from rewards.served.guard import Guard, configure
from rewards.served.wire import CONTENT_TYPE, MOST_HEADER, NOT_FINITE, Batch, as_floats, decode, header_bytes

ROOM = 4  # requests of maximum size held for each reward; others wait unread in their sockets
ARRIVAL = 60  # seconds for a body to arrive
STALLED = 300  # seconds after which a call counts as hanging
Values = list[float | str | None]  # one per sample, as in an answer
log = logging.getLogger(__name__)


def app(
    rewards: Sequence[Reward],
    token: str | None = None,
    *,
    batch_size: int = 64,
    max_bytes: int = 256 << 20,
    device: torch.device | str = "cpu",
) -> Guard:
    """Return the ASGI application; raise RewardError if a reward's name cannot be part of a URL or occurs twice.

    Waiting requests are joined up to `batch_size` samples; one request is never split. `max_bytes` bounds its body. Rewards
    receive their samples on `device`.
    """
    lanes: dict[str, _Lane] = {}
    refused: Counter[str] = Counter()
    for reward in rewards:
        if not re.fullmatch(r"\w[\w.-]*", reward.name) or reward.name in ("health", "metrics", *lanes):
            allowed = "letters, digits, '.', '_' and '-', none twice, not health or metrics"
            raise RewardError(f"{reward} needs another name to be served: {allowed}")
        lanes[reward.name] = _Lane(reward, batch_size, max_bytes, device)

    async def score(request: Request) -> JSONResponse:
        name = request.path_params["name"]
        if name not in lanes:
            raise HTTPException(404, f"there is no reward {name!r} here, {nearest(name, lanes)}")
        lane = lanes[name]
        if request.headers.get("content-type") != CONTENT_TYPE:
            raise HTTPException(415, f"the content type must be {CONTENT_TYPE}")
        lane.check()
        size = _read_size(request, max_bytes)
        async with lane.bodies.reserve(size):
            body = await _read_body(request, size)
            async with lane.headers.reserve(min(header_bytes(body), MOST_HEADER)):
                try:
                    batch = decode(body)
                except ValueError as error:
                    raise HTTPException(422, str(error)) from None
                return JSONResponse({"rewards": await lane.score(batch, request)})

    async def health(request: Request) -> JSONResponse:
        state = {"rewards": {k: lane.card() for k, lane in lanes.items()}, "max_bytes": max_bytes, "refused": refused}
        try:
            for lane in lanes.values():
                lane.check()
        except HTTPException as error:
            return JSONResponse({"error": error.detail, **state}, error.status_code)
        return JSONResponse(state)

    async def metrics(request: Request) -> PlainTextResponse:
        lines = [line for lane in lanes.values() for line in lane.metrics()]
        lines += [f'flowgrpo_refused_total{{status="{status}"}} {number}' for status, number in refused.items()]
        return PlainTextResponse("".join(f"{line}\n" for line in lines))

    async def fault(request: Request, error: HTTPException) -> JSONResponse:
        return JSONResponse({"error": one_line(_escape(error.detail))}, error.status_code, error.headers)

    routes = [Route("/health", health), Route("/metrics", metrics), Route("/{name}", score, methods=["POST"])]
    handlers = {HTTPException: fault}
    application = Starlette(routes=routes, exception_handlers=handlers)  # type: ignore[arg-type]  # typed for Exception
    application.router.redirect_slashes = False  # a redirect would use the client's host name
    return Guard(application, token, refused)


def read_token(variable: str) -> str:
    """Return the token in an environment variable; raise RewardError if it is empty or cannot be sent in a header."""
    token = os.environ.get(variable, "")
    if not token:
        raise RewardError(f"--token-env: the environment variable {variable} is not set")
    if not (token.isascii() and token.isprintable()) or token != token.strip():
        raise RewardError(f"--token-env: {variable} holds a character that no header can have, such as a line break")
    return token


def run(application: Guard, listening: socket.socket) -> None:
    """Serve until interrupted, then raise KeyboardInterrupt, which uvicorn sometimes swallows."""
    keep_freed_memory()
    uvicorn.Server(configure(application)).run(sockets=[listening])
    raise KeyboardInterrupt


class _Room:
    """A number of bytes that requests share; a request waits until enough are free."""

    def __init__(self, size: int):
        self.free, self.changed = size, asyncio.Condition()

    @asynccontextmanager
    async def reserve(self, size: int) -> AsyncIterator[None]:
        async with self.changed:
            await self.changed.wait_for(lambda: self.free >= size)
            self.free -= size
        try:
            yield
        finally:
            async with self.changed:
                self.free += size
                self.changed.notify_all()


@dataclass(eq=False)
class _Call:
    """A request for a reward and its result."""

    batch: Batch
    outcome: Values | BaseException | None = None


class _Lane:
    """A reward and its waiting requests."""

    def __init__(self, reward: Reward, batch_size: int, max_bytes: int, device: torch.device | str):
        self.reward, self.batch_size, self.device = reward, batch_size, device
        self.bodies, self.headers = _Room(ROOM * max_bytes), _Room(ROOM * MOST_HEADER)
        self.waiting: deque[_Call] = deque()
        self.free, self.thread = asyncio.Lock(), ThreadPoolExecutor(1, initializer=own_directory)
        self.counted: defaultdict[str, float] = defaultdict(float)
        self.started: float | None = None  # time at which the current call began

    def card(self) -> dict[str, object]:
        """Return the reward's entry in /health."""
        about = {"group_wise": self.reward.group_wise, "columns": self.reward.takes}
        return {**about, "waiting": len(self.waiting), "busy": self.busy()}

    def busy(self) -> float:
        """Return the seconds since the current call began; 0 between calls."""
        started = self.started  # its thread may reset it meanwhile
        return 0.0 if started is None else time.perf_counter() - started

    def check(self) -> None:
        """Raise HTTPException if the reward does not return, since new requests would only wait."""
        if self.busy() > STALLED:
            raise HTTPException(503, f"{self.reward} has not returned for {self.busy():.0f} s")

    async def score(self, batch: Batch, request: Request) -> Values:
        """Return the rewards of one request, alone or joined with waiting ones; raise HTTPException if it fails."""
        call = _Call(batch)
        self.waiting.append(call)
        self.counted["requests"] += 1
        waits = self.free.locked()
        async with self.free:
            if waits and call.outcome is None and await request.is_disconnected():  # the client may have sent it again
                self.waiting.remove(call)
                raise HTTPException(400, "the client left before its turn")
            while call.outcome is None:
                await asyncio.get_running_loop().run_in_executor(self.thread, self._run, self._next())
        if isinstance(call.outcome, BaseException):
            self.counted["failures"] += 1
            problem = f"{type(call.outcome).__name__}: {call.outcome}"
            status = 422 if isinstance(call.outcome, ValueError) else 500
            raise HTTPException(status, f"{self.reward} failed: {problem}")
        return call.outcome

    def _next(self) -> list[_Call]:
        """Return the oldest request and those after it that fit into the same call."""
        joined = [self.waiting.popleft()]
        first = joined[0].batch
        size = len(first.prompts)
        while self.waiting and not self.reward.group_wise:
            other = self.waiting[0].batch
            alike = _shape(first) == _shape(other) and first.columns.keys() == other.columns.keys()
            size += len(other.prompts)
            if not alike or size > self.batch_size:
                break
            joined.append(self.waiting.popleft())
        return joined

    def _run(self, calls: Sequence[_Call]) -> None:
        """Set the outcome of each request; if they fail together, try each alone."""
        outcomes: Sequence[Values | BaseException]
        try:
            outcomes = self._score([call.batch for call in calls])
        except BaseException as error:  # a plug-in may raise SystemExit, too
            if len(calls) > 1:
                for call in calls:
                    self._run([call])
                return
            trace = str(error) if isinstance(error, RewardError) else "".join(traceback.format_exception(error))
            log.warning("%s failed\n%s", self.reward, _escape(trace).rstrip())
            outcomes = [error]
        for call, outcome in zip(calls, outcomes, strict=True):
            call.outcome = outcome

    def _score(self, batches: Sequence[Batch]) -> list[Values]:
        """Return the rewards of some batches from one call."""
        self.started = started = time.perf_counter()
        try:
            with torch.no_grad():
                values = self.reward(
                    _join([batch.samples for batch in batches], self.device),
                    [prompt for batch in batches for prompt in batch.prompts],
                    {name: [v for batch in batches for v in batch.columns[name]] for name in batches[0].columns},
                )
        finally:
            self.started = None
            self.counted["calls"] += 1
            self.counted["seconds"] += time.perf_counter() - started
        self.counted["samples"] += len(values)
        return [
            [None if math.isnan(v) else v if math.isfinite(v) else NOT_FINITE for v in part.tolist()]
            for part in values.split([len(batch.prompts) for batch in batches])
        ]

    def metrics(self) -> list[str]:
        """Return the counters in Prometheus format."""
        label = f'{{reward="{self.reward.name}"}}'
        names = ("requests", "failures", "calls", "samples", "seconds")
        counters = [f"flowgrpo_{name}_total{label} {self.counted[name]:g}" for name in names]
        return [*counters, f"flowgrpo_waiting{label} {len(self.waiting)}"]


def _escape(text: str) -> str:
    """Escape lone surrogates, which JSON may contain."""
    return text.encode(errors="backslashreplace").decode()


def _shape(batch: Batch) -> torch.Size | None:
    """Return the shape of one sample; None for texts."""
    return batch.samples.shape[1:] if isinstance(batch.samples, torch.Tensor) else None


def _join(parts: Sequence[torch.Tensor | list[str]], device: torch.device | str) -> torch.Tensor | list[str]:
    if isinstance(parts[0], torch.Tensor):
        floats = [as_floats(part) for part in parts if isinstance(part, torch.Tensor)]
        return (torch.cat(floats) if len(floats) > 1 else floats[0]).to(device)
    return [text for part in parts for text in part]


def _read_size(request: Request, most: int) -> int:
    """Return the announced size of the body."""
    length = request.headers.get("content-length", "")
    if not re.fullmatch("[0-9]{1,20}", length) or "transfer-encoding" in request.headers:
        raise HTTPException(411, "the size of the body must be announced, in Content-Length")
    if int(length) > most:
        raise HTTPException(413, f"the body may have {most} bytes at most")
    return int(length)


async def _read_body(request: Request, size: int) -> bytearray:
    """Return the body of a request, of the announced size."""
    body = bytearray()
    try:
        async with asyncio.timeout(ARRIVAL):
            async for part in request.stream():
                body += part
    except ClientDisconnect:
        raise HTTPException(400, "the client left before its request was complete") from None
    except TimeoutError:
        raise HTTPException(408, f"the body did not arrive within {ARRIVAL} s") from None
    if len(body) != size:
        raise HTTPException(400, f"the body has {len(body)} bytes, not the {size} that were announced")
    return body
