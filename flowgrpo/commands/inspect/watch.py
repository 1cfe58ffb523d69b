"""`flowgrpo watch`: serve the report of a running run on this machine; the page refreshes when the run's files change.

    GET /         the page
    GET /events   server-sent events: {"state": ..., "age": seconds}, now and after each change of the run's files

The server only reads, takes no lock, and answers only requests to a name of this machine (`rewards.served.guard`).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
import time
import warnings
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, StreamingResponse
from starlette.routing import Route

from flowgrpo.commands.report.page import page, unreadable
from flowgrpo.commands.report.read import read
from flowgrpo.commands.terminal import print_line
from flowgrpo.errors import InputError
from rewards.served import guard

PAUSE = 0.5  # seconds between two looks at the files
QUIET = 15.0  # seconds until a comment is sent, so that both sides notice a lost connection
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
    """A watched run, with its page cached until a file changes."""

    def __init__(self, run: Path):
        self.run = run
        self._name = run.resolve().name
        self._page: tuple[str, str] | None = None
        self._lock = threading.Lock()

    def look(self) -> tuple[str, float | None]:
        """Return a digest of the state of the run's files, and the seconds since their last change (None without files)."""
        files = []
        for path in (*(self.run / name for name in FILES), *sorted((self.run / "trees").glob("step-*"))[-1:]):
            try:
                status = path.stat()
            except OSError:  # not yet there, or just being replaced
                continue
            files.append((str(path), status.st_mtime_ns, status.st_size))
        state = hashlib.sha256(json.dumps([self.run.is_dir(), *files]).encode()).hexdigest()[:16]
        newest = max((changed for _, changed, _ in files), default=None)
        return state, None if newest is None else max(0.0, time.time() - newest / 1e9)

    def page(self) -> str:
        """Return the HTML of the run's report, or of the reason why the run cannot be read."""
        with self._lock:
            state, _ = self.look()
            if self._page is None or self._page[0] != state:
                self._page = state, self._build_page(state)
            return self._page[1]

    def _build_page(self, state: str) -> str:
        if not self.run.is_dir():
            return unreadable(self._name, f"{self.run}: the folder is not there any more", state)
        try:
            return page(read(self.run), live=state)
        except (InputError, OSError) as error:
            return unreadable(self._name, str(error), state)


def application(run: Path, ends: Callable[[], bool]) -> guard.Guard:
    """Build the ASGI application; its event streams end once `ends` returns true, so that the server can end."""
    watched = Watched(run)

    def get_page(request: Request) -> HTMLResponse:
        return HTMLResponse(watched.page(), headers=HEADERS)

    async def states() -> AsyncIterator[str]:
        sent, at = None, time.monotonic()
        yield "retry: 1000\n\n"
        while not ends():
            state, age = await asyncio.to_thread(watched.look)
            if state != sent:
                yield f"event: state\ndata: {json.dumps({'state': state, 'age': age})}\n\n"
                sent, at = state, time.monotonic()
            elif time.monotonic() - at > QUIET:
                yield ": nothing new\n\n"
                at = time.monotonic()
            await asyncio.sleep(PAUSE)

    async def get_events(request: Request) -> StreamingResponse:
        return StreamingResponse(states(), media_type="text/event-stream", headers=HEADERS)

    return build_guarded_app([Route("/", get_page, methods=["GET"]), Route("/events", get_events, methods=["GET"])])


def build_guarded_app(routes: Sequence[Route]) -> guard.Guard:
    """Build an application that answers only requests to a name of this machine."""
    app = Starlette(routes=routes)
    app.router.redirect_slashes = False  # a redirect would go to an address that the client names
    return guard.Guard(app, None, Counter())


def watch(run: Path, port: int) -> None:
    """Print the address of a run's report on 127.0.0.1 and serve it until interrupted (KeyboardInterrupt).

    Raises RewardError if the port is not available.
    """
    listening = guard.listen("127.0.0.1", port, None)
    server = uvicorn.Server(guard.configure(application(run, lambda: server.should_exit)))
    print_line(f"{run.resolve().name}  http://127.0.0.1:{listening.getsockname()[1]}/")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a last line may be half written
        server.run(sockets=[listening])
    raise KeyboardInterrupt  # uvicorn returns for no other reason, but does not always raise it again
