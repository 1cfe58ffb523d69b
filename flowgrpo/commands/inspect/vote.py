"""Pairs of samples shown to a person on this machine, who says which is better; the votes go to a file.

    GET  /            the page
    GET  /pair        the next pair as JSON, or that none is left
    GET  /media/PAIR/SIDE  a sample of a pair, SIDE a or b
    POST /vote        {"pair": number, "vote": "a" | "b" | "neither"}; answers with the next pair
    POST /undo        takes the last vote of this file back; answers with its pair

Each vote is a line that is on the disk before the next pair is shown, so that nothing is lost when the page or the server
ends; what was voted on is not asked again. The file is locked, so that no other ballot writes over it. Only who asks by a
name of this machine is answered, and no page of another origin can vote: a request to vote must be JSON, which such a page
cannot send unasked.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import combinations, zip_longest
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from flowgrpo.commands.gallery.pages import template
from flowgrpo.commands.inspect.watch import HEADERS
from flowgrpo.commands.terminal import out
from flowgrpo.errors import InputError
from flowgrpo.training.run.run_files import read_manifest
from flowgrpo.training.run.run_folder import check_writable, replace_text
from rewards.base import RewardError
from rewards.files import suffixes
from rewards.models.votes import OUTCOMES, read_votes
from rewards.served import guard

SEED = 0  # of the order of the pairs
LARGEST = 1 << 12  # bytes of a vote


@dataclass(frozen=True)
class Pair:
    """Two pictures of one prompt."""

    prompt: str
    a: Path
    b: Path


def pairs_of(folders: Sequence[Path]) -> list[Pair]:
    """All pairs of samples of one prompt in runs and folders of samples, in an order that meets every prompt by turns.

    Which of two is shown first is drawn; pictures of the same bytes are no pair.

    Raises:
        InputError: there are none, or a sample is no picture.
    """
    by_prompt: dict[str, dict[bytes, Path]] = defaultdict(dict)  # by what digests the picture
    for folder in folders:
        samples = folder / "samples" if (folder / "samples" / "manifest.jsonl").is_file() else folder
        for line in read_manifest(samples):
            file = samples / line["file"]
            if suffixes.suffix_of(file) not in suffixes.BROWSER_PICTURES:
                shown = ", ".join(suffixes.BROWSER_PICTURES)
                raise InputError(f"{file} is no picture that a browser shows; votes are on {shown}")
            if not file.is_file():
                raise InputError(f"{samples / 'manifest.jsonl'}: there is no file {file}")
            by_prompt[line["prompt"]].setdefault(hashlib.blake2b(file.read_bytes()).digest(), file)
    drawn = random.Random(SEED)
    columns = []
    for prompt, files in by_prompt.items():
        own = [Pair(prompt, *drawn.sample(pair, 2)) for pair in combinations(files.values(), 2)]
        drawn.shuffle(own)
        columns.append(own)
    drawn.shuffle(columns)
    found = [pair for row in zip_longest(*columns) for pair in row if pair is not None]
    if not found:
        names = ", ".join(map(str, folders))
        raise InputError(f"{names}: there are no two different pictures of one prompt to vote on")
    return found


class Ballot:
    """Pairs, and the file of votes on them.

    Args:
        file: of votes, which may be there already.

    Raises:
        InputError: it cannot be written, or holds something else than votes.
    """

    def __init__(self, pairs: Sequence[Pair], file: Path):
        if file.exists() and not file.is_file():
            raise InputError(f"--out: {file} is there and no ordinary file; name one, such as votes.jsonl")
        check_writable(file.parent, str(file))
        self.pairs, self.file = list(pairs), file
        self._lines = []
        if file.is_file():
            try:
                read_votes(file)
            except RewardError as error:
                raise InputError(f"{error}; name another file by --out") from error
            self._lines = file.read_text(encoding="utf-8").splitlines()
        voted = self._voted()
        self._left = [number for number, pair in enumerate(self.pairs) if self._key(pair) not in voted]

    @property
    def told(self) -> dict[str, Any]:
        """The next pair, as the page is told; `pair` is None where none is left."""
        number = self._left[0] if self._left else None
        prompt = None if number is None else self.pairs[number].prompt
        return {"pair": number, "prompt": prompt, "votes": len(self._lines), "left": len(self._left)}

    def vote(self, number: int, choice: str) -> None:
        """Write the vote on the next pair.

        Raises:
            ValueError: it is another pair that is asked, as where two pages are open, or the choice is none.
        """
        if choice not in OUTCOMES or not self._left or number != self._left[0]:
            raise ValueError("another pair is asked now")
        pair = self.pairs[number]
        a, b = self._key(pair)
        line = {
            "prompt": pair.prompt,
            "a": a,
            "b": b,
            "vote": choice,
            "time": datetime.now(UTC).isoformat("T", "seconds"),
        }
        self._write([*self._lines, json.dumps(line)])
        del self._left[0]

    def undo(self) -> bool:
        """Take the last vote back, so that its pair is the next; False where there is none, or it is on other pictures."""
        if not self._lines:
            return False
        told = json.loads(self._lines[-1])
        again = [n for n, pair in enumerate(self.pairs) if {*self._key(pair)} == {told["a"], told["b"]}]
        if not again:
            return False
        self._write(self._lines[:-1])
        self._left = again[:1] + self._left
        return True

    def _write(self, lines: Sequence[str]) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        replace_text(self.file, "".join(f"{line}\n" for line in lines))
        self._lines = list(lines)

    def _voted(self) -> set[tuple[str, str]]:
        told = map(json.loads, self._lines)
        return {pair for each in told for pair in ((each["a"], each["b"]), (each["b"], each["a"]))}

    def _key(self, pair: Pair) -> tuple[str, str]:
        """The files as the file of votes names them, from where it lies."""
        a, b = (Path(os.path.relpath(file, self.file.parent)).as_posix() for file in (pair.a, pair.b))
        return a, b


def application(ballot: Ballot, name: str) -> guard.Guard:
    """The ASGI application that asks for votes; `name` stands in the head of its page."""
    page = template("vote.html.jinja").render(name=name)
    policy = HEADERS["Content-Security-Policy"].replace("img-src", "img-src 'self'")
    headers = {**HEADERS, "Content-Security-Policy": policy}

    async def shown(request: Request) -> Response:
        return HTMLResponse(page, headers=headers)

    async def pair(request: Request) -> Response:
        return JSONResponse(ballot.told, headers=headers)

    async def media(request: Request) -> Response:
        number, side = request.path_params["number"], request.path_params["side"]
        if number >= len(ballot.pairs) or side not in ("a", "b"):
            return JSONResponse({"error": "there is no such picture"}, 404, headers)
        file = getattr(ballot.pairs[number], side)
        return FileResponse(file, media_type=suffixes.BROWSER_PICTURES[suffixes.suffix_of(file)], headers=headers)

    async def voted(request: Request) -> Response:
        asked = await _json(request)
        try:
            ballot.vote(asked["pair"], asked["vote"])
        except (ValueError, KeyError, TypeError):
            return JSONResponse({**ballot.told, "error": "another pair is asked now"}, 409, headers)
        return JSONResponse(ballot.told, headers=headers)

    async def undone(request: Request) -> Response:
        await _json(request)
        ballot.undo()
        return JSONResponse(ballot.told, headers=headers)

    routes = [
        Route("/", shown, methods=["GET"]),
        Route("/pair", pair, methods=["GET"]),
        Route("/media/{number:int}/{side}", media, methods=["GET"]),
        Route("/vote", voted, methods=["POST"]),
        Route("/undo", undone, methods=["POST"]),
    ]
    served = Starlette(routes=routes)
    served.router.redirect_slashes = False
    return guard.Guard(served, None, Counter())


async def _json(request: Request) -> Any:
    """The body of a request, which is small and says that it is JSON.

    Raises:
        HTTPException: it is something else.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise HTTPException(415, "the content type must be application/json")
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > LARGEST:
            raise HTTPException(413, f"the body may have {LARGEST} bytes at most")
    try:
        return json.loads(body or b"null")
    except (ValueError, RecursionError):
        raise HTTPException(422, "the body is no JSON") from None


def vote(folders: Sequence[Path], file: Path | None, port: int) -> None:
    """Ask for votes until interrupted, and print the page's address.

    Args:
        folders: runs, or folders of samples with a manifest.
        file: of votes; by default votes.jsonl in the first folder.
        port: on 127.0.0.1; 0 takes a free one.

    Raises:
        InputError: there is nothing to vote on, or the file cannot be written or holds something else.
        RewardError: the port cannot be listened on.
        KeyboardInterrupt: it was interrupted.
    """
    pairs, file = pairs_of(folders), file or folders[0] / "votes.jsonl"
    with _alone(file):
        ballot = Ballot(pairs, file)
        listening = guard.listen("127.0.0.1", port, None)
        served = application(ballot, folders[0].resolve().name)
        out.print(f"votes    {ballot.file}", soft_wrap=True)
        out.print(f"page     http://127.0.0.1:{listening.getsockname()[1]}/", soft_wrap=True)
        uvicorn.Server(guard.configured(served)).run(sockets=[listening])
        raise KeyboardInterrupt  # uvicorn returns for no other reason


@contextmanager
def _alone(file: Path) -> Iterator[None]:
    """Hold the lock of a file of votes, which the kernel takes away with the process.

    Raises:
        InputError: another ballot holds it, or it cannot be made.
    """
    check_writable(file.parent, str(file))
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.with_name(f".{file.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(
                f"{file}: another flowgrpo vote writes it; end that one, or name another file by --out"
            ) from None
        yield
