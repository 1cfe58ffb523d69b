"""The report of a run that goes on, served on this machine: a page that refreshes itself when the run's files change.

    GET /         the page
    GET /events   server-sent events: {"state": ..., "age": seconds} now and whenever the run's files have changed

It only reads, takes no lock, and answers only who asks by a name of this machine (`rewards.served.guard`).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
import time
import warnings
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, StreamingResponse
from starlette.routing import Route

from flowgrpo.commands.report.page import page, unreadable
from flowgrpo.commands.report.read import read
from flowgrpo.commands.terminal import out
from flowgrpo.errors import InputError
from rewards.served import guard

PAUSE = 0.5  # seconds between two looks at the files
QUIET = 15.0  # seconds after which something is sent, so that either side learns that the other is gone
FILES = ("config.yaml", "environment.json", "metrics.jsonl", "log.txt", "samples/manifest.jsonl")
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": (
        "default-src 'none'; img-src data:; media-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Watched:
    """A run that is looked at, and its page as long as nothing changes."""

    def __init__(self, run: Path):
        self.run = run
        self._name = run.resolve().name
        self._page: tuple[str, str] | None = None
        self._lock = threading.Lock()

    def look(self) -> tuple[str, float | None]:
        """What names the state of the run's files, and the seconds since the last change; None without any."""
        found = []
        for path in (*(self.run / name for name in FILES), *sorted((self.run / "trees").glob("step-*"))[-1:]):
            try:
                status = path.stat()
            except OSError:  # not yet there, or just being replaced
                continue
            found.append((str(path), status.st_mtime_ns, status.st_size))
        state = hashlib.sha256(json.dumps([self.run.is_dir(), *found]).encode()).hexdigest()[:16]
        newest = max((changed for _, changed, _ in found), default=None)
        return state, None if newest is None else max(0.0, time.time() - newest / 1e9)

    def page(self) -> str:
        """The HTML of the run as it is; of one that cannot be read, why."""
        with self._lock:
            state, _ = self.look()
            if self._page is None or self._page[0] != state:
                self._page = state, self._written(state)
            return self._page[1]

    def _written(self, state: str) -> str:
        if not self.run.is_dir():
            return unreadable(self._name, f"{self.run}: the folder is not there any more", state)
        try:
            return page(read(self.run), live=state)
        except (InputError, OSError) as error:
            return unreadable(self._name, str(error), state)


def application(run: Path, ends: Callable[[], bool]) -> guard.Guard:
    """The ASGI application.

    Args:
        run: its folder.
        ends: whether the server is to end, and its events with it.
    """
    watched = Watched(run)

    def shown(request: Request) -> HTMLResponse:
        return HTMLResponse(watched.page(), headers=HEADERS)

    async def told() -> AsyncIterator[str]:
        said, spoken = None, time.monotonic()
        yield "retry: 1000\n\n"
        while not ends():
            state, age = await asyncio.to_thread(watched.look)
            if state != said:
                yield f"event: state\ndata: {json.dumps({'state': state, 'age': age})}\n\n"
                said, spoken = state, time.monotonic()
            elif time.monotonic() - spoken > QUIET:
                yield ": nothing new\n\n"
                spoken = time.monotonic()
            await asyncio.sleep(PAUSE)

    async def events(request: Request) -> StreamingResponse:
        return StreamingResponse(told(), media_type="text/event-stream", headers=HEADERS)

    routes = [Route("/", shown, methods=["GET"]), Route("/events", events, methods=["GET"])]
    served = Starlette(routes=routes)
    served.router.redirect_slashes = False  # to an address that the client names
    return guard.Guard(served, None, Counter())


def watch(run: Path, port: int) -> None:
    """Serve the report of a run until interrupted, and print its address.

    Args:
        port: on 127.0.0.1; 0 takes a free one.

    Raises:
        RewardError: the port cannot be listened on.
        KeyboardInterrupt: it was interrupted.
    """
    listening = guard.listen("127.0.0.1", port, None)
    server = uvicorn.Server(guard.configured(application(run, lambda: server.should_exit)))
    out.print(f"{run.resolve().name}  http://127.0.0.1:{listening.getsockname()[1]}/", soft_wrap=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of a last line that is being written
        server.run(sockets=[listening])
    raise KeyboardInterrupt  # uvicorn returns for no other reason, and now and then without raising it again
