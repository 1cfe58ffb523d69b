"""Protect the reward server from the network: refuse requests without permission, and close slow connections.

uvicorn bounds the size of a request's head, but waits forever for its end, and answers nobody once all connections are
taken. Here a head must arrive within `FIRST` seconds. When all connections are taken, one without a request is closed.
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import socket
from collections import Counter
from typing import cast
from urllib.parse import urlsplit

import h11
import uvicorn
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from rewards.base import RewardError
from rewards.served.endpoint import is_loopback

HEAD = 16 << 10  # bytes of a request before its body
FIRST = 10  # seconds from the start of a connection to the end of the first head
KEEP_ALIVE = 75  # seconds from an answer to the end of the next head; longer than clients keep a connection
CONNECTIONS = 512  # half of the usual limit of open files


class Guard:
    """An application that answers permitted requests only and counts refused ones by status.

    With a `token`, requests must bear it. Without one, their host must be a name of this machine; otherwise a web page in a
    browser here could resolve its own name to our address and send requests. In `refused`, `late` counts connections that
    sent no request in time.
    """

    def __init__(self, application: ASGIApp, token: str | None, refused: Counter[str]):
        self.application, self.refused = application, refused
        self._expected = None if token is None else f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one ASGI request."""

        async def counting(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] >= 400:
                self.refused[str(message["status"])] += 1
            await send(message)

        await (self._refusal(dict(scope["headers"])) or self.application)(scope, receive, counting)

    def _refusal(self, headers: dict[bytes, bytes]) -> JSONResponse | None:
        closing = {"Connection": "close"}
        if self._expected is None:
            if _is_this_machine(headers.get(b"host", b"").decode("latin-1")):
                if headers.get(b"sec-fetch-site") != b"cross-site" or headers.get(b"sec-fetch-mode") == b"navigate":
                    return None
                complaint = "a page of another site may lead here, and not ask here"
                return JSONResponse({"error": complaint}, 403, closing)
            complaint = "without a token only 127.0.0.1 and localhost are answered, whatever other names lead here"
            return JSONResponse({"error": complaint}, 421, closing)
        if hmac.compare_digest(headers.get(b"authorization", b""), self._expected):
            return None
        return JSONResponse({"error": "the token is missing or wrong"}, 401, {"WWW-Authenticate": "Bearer", **closing})


def _is_this_machine(host: str) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname
    except ValueError:
        return False
    return name is not None and is_loopback(name)


class Connection(H11Protocol):
    """A connection of uvicorn that ends if the head of a request is late."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's own
        """Start the timer. If there are too many connections, close the silent one that would time out first."""
        super().connection_made(transport)
        self._close_at(self.loop.time() + FIRST)
        if len(self.connections) > CONNECTIONS:
            connections = (each for each in self.connections if isinstance(each, Connection))
            silent = [each for each in connections if each.silent and not each.transport.is_closing()]
            min(silent, key=Connection.ends_at).timeout_keep_alive_handler()

    def ends_at(self) -> float:
        """Return the loop's time at which the connection is closed if no head arrives."""
        assert self.timeout_keep_alive_task is not None  # a silent connection has a timer
        return self.timeout_keep_alive_task.when()

    @property
    def refused(self) -> Counter[str]:
        """The application's counter of refused requests."""
        return cast(Guard, self.config.app).refused

    @property
    def silent(self) -> bool:
        """True if no request with a complete head awaits its answer."""
        return self.cycle is None or self.cycle.response_complete

    def data_received(self, data: bytes) -> None:
        """Keep the timer running until a head is complete."""
        timer = self.timeout_keep_alive_task
        super().data_received(data)
        if timer is not None and self.timeout_keep_alive_task is None and self.silent:
            self._close_at(timer.when())

    def timeout_keep_alive_handler(self) -> None:
        """Close the connection, even if the other side does not read."""
        if self.cycle is None and not self.transport.is_closing():
            self.refused["late"] += 1
        self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        """Refuse a request that is not HTTP or has too large a head (`HEAD`); answer no request twice."""
        self.refused["400"] += 1
        if self.cycle is not None:
            self.cycle.disconnected = True
        headless = self.conn.our_state is h11.SEND_RESPONSE and self.scope["method"] == "HEAD"
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE) and not headless:
            super().send_400_response(msg)
        else:
            self.transport.abort()

    def _close_at(self, when: float) -> None:
        self.timeout_keep_alive_task = self.loop.call_at(when, self.timeout_keep_alive_handler)


def listen(host: str, port: int, token: str | None) -> socket.socket:
    """Return a listening socket; raise RewardError if it needs a token or the address is not available."""
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


def configure(application: Guard) -> uvicorn.Config:
    """Return the configuration of uvicorn."""
    return uvicorn.Config(
        application, http=Connection, ws="none", lifespan="off", h11_max_incomplete_event_size=HEAD,
        timeout_keep_alive=KEEP_ALIVE, timeout_graceful_shutdown=5, proxy_headers=False,
        log_level="error", access_log=False,
    )  # fmt: skip
