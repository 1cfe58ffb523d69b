"""Client of a reward in a server (`flowgrpo serve`)."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal
from urllib.parse import urlsplit

import torch

from rewards.base import RewardError, nearest
from rewards.served.endpoint import Endpoint
from rewards.served.wire import CONTENT_TYPE, MOST_HEADER, NOT_FINITE, TRANSPORTS, encode

Samples = torch.Tensor | Sequence[str]
Columns = Mapping[str, Sequence[Any]]


class Client:
    """A served reward by its URL.

    A batch is split among the replicas and into parts that a server accepts; a group-wise reward gets its group whole.

    Args:
        url: `http://host:port/name`; several, separated by commas, are replicas.
        replicas: further URLs of the same reward.
        timeout: seconds per call, with all its parts and retries.
        retries: further rounds over the replicas after a failure, each after twice the pause.
        token_env: name of the environment variable with the server's token.
        transport: `float32`, exact, or `uint8`, a quarter of the size and rounded to 256 levels.
    """

    remote = True  # waits for a server and retries by itself

    def __init__(
        self,
        url: str,
        *,
        replicas: Sequence[str] = (),
        timeout: float = 60.0,
        retries: int = 4,
        token_env: str | None = None,
        transport: Literal["float32", "uint8"] = "float32",
    ):
        if transport not in TRANSPORTS:
            raise RewardError(f"transport: there is no {transport!r}, {nearest(transport, TRANSPORTS)}")
        urls = [part.strip().rstrip("/") for part in (*url.split(","), *replicas)]
        for part in urls:
            if not urlsplit(part).path:
                raise RewardError(f"{part} names no reward, write {part}/NAME")
        bases, names = zip(*(part.rpartition("/")[::2] for part in urls), strict=True)
        self._endpoint = Endpoint(bases, timeout, retries, token_env)
        self._transport = transport
        cards = [self._read_card(base, name) for base, name in zip(bases, names, strict=True)]
        for other, name, card in zip(urls, names, cards, strict=True):
            if (name, card[:-1]) != (names[0], cards[0][:-1]):
                raise RewardError(f"{urls[0]} and {other} serve different rewards, replicas serve the same")
        self.name, (self.group_wise, self._takes, _) = names[0], cards[0]
        self._most_bytes = min(most for *_, most in cards)

    def __call__(self, samples: Samples, prompts: Sequence[str], **columns: Any) -> list[float | None]:
        """Return the served reward of B samples (or texts)."""
        columns = {k: v for k, v in columns.items() if self._takes is None or k in self._takes}
        size, deadline = len(prompts), time.monotonic() + self._endpoint.timeout
        parts = 1 if self.group_wise else min(len(self._endpoint.urls), size)
        cuts = [slice(size * i // parts, size * (i + 1) // parts) for i in range(parts)]
        if parts == 1:
            return self._ask(samples, prompts, columns, deadline)
        with ThreadPoolExecutor(parts) as pool:
            jobs = [pool.submit(self._ask, samples[c], prompts[c], _cut(columns, c), deadline) for c in cuts]
            return [value for job in jobs for value in job.result()]

    def _ask(self, samples: Samples, prompts: Sequence[str], columns: Columns, deadline: float) -> list:
        size = len(prompts)
        start, header, data = encode(samples, prompts, columns, self._transport)
        length = len(start) + len(header) + len(data)
        if length > self._most_bytes or len(header) > MOST_HEADER:
            if not self.group_wise and size > 1:
                halves = slice(0, size // 2), slice(size // 2, size)
                parts = [self._ask(samples[c], prompts[c], _cut(columns, c), deadline) for c in halves]
                return [value for part in parts for value in part]
            if len(header) > MOST_HEADER:
                bound = f"{MOST_HEADER} bytes of prompts, columns and texts"
                raise RewardError(f"{self.name} takes {bound} at most, not the {len(header)} of {size} samples")
            raise RewardError(
                f"{self.name} takes {self._most_bytes} bytes at most, not the {length} of {size} samples: "
                "use the option transport: uint8, or serve it with a larger --max-mib"
            )
        body, headers = b"".join((start, header, data)), {"Content-Type": CONTENT_TYPE}
        response = self._endpoint.ask("POST", f"/{self.name}", deadline=deadline, content=body, headers=headers)
        try:
            values = response.json()["rewards"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise RewardError(f"{response.url} answered with no rewards: {response.text[:100]!r}") from None
        if not isinstance(values, list) or len(values) != size:
            count = f"{len(values)} rewards" if isinstance(values, list) else type(values).__name__
            raise RewardError(f"{response.url} answered with {count} for {size} samples")
        return [math.nan if value == NOT_FINITE else value for value in values]

    def _read_card(self, base: str, name: str) -> tuple[bool, list[str] | None, int]:
        """Return from /health if the reward is group-wise, its columns (None: all), and the largest body of a request."""
        response = self._endpoint.ask("GET", "/health", only=base)
        try:
            health = response.json()
            cards = {k: (card["group_wise"], card["columns"]) for k, card in health["rewards"].items()}
            most_bytes = health["max_bytes"]
            sound = isinstance(most_bytes, int) and all(_is_card(*card) for card in cards.values())
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            sound = False
        if not sound:
            raise RewardError(f"{base} is not a reward server of flowgrpo serve")
        if name not in cards:
            raise RewardError(f"{base} serves no reward {name!r}, {nearest(name, cards)}")
        return *cards[name], most_bytes


def _cut(columns: Columns, rows: slice) -> Columns:
    return {name: values[rows] for name, values in columns.items()}


def _is_card(group_wise: object, columns: object) -> bool:
    """Return whether /health gave these two fields in the types of our server."""
    is_names = isinstance(columns, list) and all(isinstance(name, str) for name in columns)
    return isinstance(group_wise, bool) and (columns is None or is_names)
