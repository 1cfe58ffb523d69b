"""`flowgrpo vote`: show pairs of samples to a person on this machine and write the votes to a file.

    GET  /            the page
    GET  /pair        the next pair as JSON, or that none is left
    GET  /media/PAIR/SIDE  a sample of a pair, SIDE a or b
    POST /vote        {"pair": number, "vote": "a" | "b" | "neither"}; answers with the next pair
    POST /undo        takes back the last vote in the file; answers with its pair

Each vote is on disk before the next pair is shown, so none is lost when the page or the server ends. A pair that has a vote
is not shown again. A lock keeps a second server from writing the same file. Only requests to a name of this machine are
answered. Votes must be JSON, which a page of another origin cannot send without permission.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import combinations, zip_longest
from pathlib import Path
from typing import Any

import uvicorn
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from flowgrpo.commands.inspect.watch import HEADERS, build_guarded_app
from flowgrpo.commands.page_parts.pages import check_out, template, write_page
from flowgrpo.commands.terminal import print_line
from flowgrpo.errors import InputError
from flowgrpo.training.run.run_files import read_manifest
from flowgrpo.training.run.run_folder import check_writable
from rewards.base import RewardError
from rewards.files import suffixes
from rewards.models.votes import OUTCOMES, read_votes
from rewards.served import guard

SHOWN = suffixes.BROWSER_PICTURES | suffixes.FILMS
SEED = 0  # for the order of the pairs
LARGEST = 1 << 12  # bytes of a request


@dataclass(frozen=True)
class Pair:
    """Two pictures or films of one prompt."""

    prompt: str
    a: Path
    b: Path


def pairs_of(folders: Sequence[Path]) -> list[Pair]:
    """Return all pairs of different samples of one prompt: a pair of each prompt, then a second of each, and so on.

    The order of the pairs, and of the two samples of a pair, is random with the seed `SEED`. Raises InputError if
    there are no pairs, or a browser shows no such sample.
    """
    by_prompt: dict[str, dict[bytes, Path]] = defaultdict(dict)  # by digest of the file
    for folder in folders:
        samples = folder / "samples" if (folder / "samples" / "manifest.jsonl").is_file() else folder
        for line in read_manifest(samples):
            file = samples / line["file"]
            if suffixes.suffix_of(file) not in SHOWN:
                raise InputError(f"{file} is no picture or film that a browser shows; votes are on {', '.join(SHOWN)}")
            if not file.is_file():
                raise InputError(f"{samples / 'manifest.jsonl'}: there is no file {file}")
            by_prompt[line["prompt"]].setdefault(hashlib.blake2b(file.read_bytes()).digest(), file)
    generator = random.Random(SEED)
    columns = []
    for prompt, files in by_prompt.items():
        of_prompt = [Pair(prompt, *generator.sample(pair, 2)) for pair in combinations(files.values(), 2)]
        generator.shuffle(of_prompt)
        columns.append(of_prompt)
    generator.shuffle(columns)
    pairs = [pair for row in zip_longest(*columns) for pair in row if pair is not None]
    if not pairs:
        names = ", ".join(map(str, folders))
        raise InputError(f"{names}: there are no two different samples of one prompt to vote on")
    return pairs


class Ballot:
    """Pairs, and the file of their votes; raise InputError if the file cannot be written or holds something else."""

    def __init__(self, pairs: Sequence[Pair], file: Path):
        check_out(file, "votes.jsonl")
        self.pairs, self.file = list(pairs), file
        self._lines = []
        if file.is_file():
            try:
                read_votes(file)
            except RewardError as error:
                raise InputError(f"{error}; name another file by --out") from error
            self._lines = file.read_text(encoding="utf-8").splitlines()
        voted = {frozenset((vote["a"], vote["b"])) for vote in map(json.loads, self._lines)}
        self._left = [number for number, pair in enumerate(self.pairs) if frozenset(self._key(pair)) not in voted]

    @property
    def told(self) -> dict[str, Any]:
        """The counts of votes and of pairs left and, if one is left, the next pair, for the page.

        `pair` is its number or None, and `shown` the elements of the page that show its two samples.
        """
        counts = {"votes": len(self._lines), "left": len(self._left)}
        if not self._left:
            return {"pair": None, **counts}
        pair = self.pairs[self._left[0]]
        shown = ["video" if suffixes.suffix_of(file) in suffixes.FILMS else "img" for file in (pair.a, pair.b)]
        return {"pair": self._left[0], "prompt": pair.prompt, "shown": shown, **counts}

    def vote(self, number: int, choice: str) -> None:
        """Write a vote on the next pair; raise ValueError for another pair (of a second open page) or a wrong choice."""
        if choice not in OUTCOMES or not self._left or number != self._left[0]:
            raise ValueError("another pair is asked now")
        pair = self.pairs[number]
        a, b = self._key(pair)
        time = datetime.now(UTC).isoformat("T", "seconds")
        line = {"prompt": pair.prompt, "a": a, "b": b, "vote": choice, "time": time}
        self._write([*self._lines, json.dumps(line)])
        del self._left[0]

    def undo(self) -> bool:
        """Take the last vote back, so that its pair comes next; return False if there is none, or `pairs` lacks its pair."""
        if not self._lines:
            return False
        last = json.loads(self._lines[-1])
        again = [n for n, pair in enumerate(self.pairs) if {*self._key(pair)} == {last["a"], last["b"]}]
        if not again:
            return False
        self._write(self._lines[:-1])
        self._left = again[:1] + self._left
        return True

    def _write(self, lines: Sequence[str]) -> None:
        write_page(self.file, "".join(f"{line}\n" for line in lines))
        self._lines = list(lines)

    def _key(self, pair: Pair) -> tuple[str, str]:
        """Return the paths of both samples relative to the folder of the votes."""
        a, b = (Path(os.path.relpath(file, self.file.parent)).as_posix() for file in (pair.a, pair.b))
        return a, b


def application(ballot: Ballot, name: str) -> guard.Guard:
    """Build the ASGI application that asks for votes; `name` is in the title of its page."""
    page = template("vote.html.jinja").render(name=name)
    policy = (
        HEADERS["Content-Security-Policy"].replace("img-src", "img-src 'self'").replace("media-src", "media-src 'self'")
    )
    headers = {**HEADERS, "Content-Security-Policy": policy}

    async def get_page(request: Request) -> Response:
        return HTMLResponse(page, headers=headers)

    async def get_pair(request: Request) -> Response:
        return JSONResponse(ballot.told, headers=headers)

    async def get_media(request: Request) -> Response:
        number, side = request.path_params["number"], request.path_params["side"]
        if number >= len(ballot.pairs) or side not in ("a", "b"):
            return JSONResponse({"error": "there is no such sample"}, 404, headers)
        file = getattr(ballot.pairs[number], side)
        return FileResponse(file, media_type=SHOWN[suffixes.suffix_of(file)], headers=headers)

    async def post_vote(request: Request) -> Response:
        body = await _json(request)
        try:
            ballot.vote(body["pair"], body["vote"])
        except (ValueError, KeyError, TypeError):
            return JSONResponse({**ballot.told, "error": "another pair is asked now"}, 409, headers)
        return JSONResponse(ballot.told, headers=headers)

    async def post_undo(request: Request) -> Response:
        await _json(request)
        ballot.undo()
        return JSONResponse(ballot.told, headers=headers)

    return build_guarded_app(
        [
            Route("/", get_page, methods=["GET"]),
            Route("/pair", get_pair, methods=["GET"]),
            Route("/media/{number:int}/{side}", get_media, methods=["GET"]),
            Route("/vote", post_vote, methods=["POST"]),
            Route("/undo", post_undo, methods=["POST"]),
        ]
    )


async def _json(request: Request) -> Any:
    """Return the body of a request; raise HTTPException if it is too large, or not declared as JSON, or not JSON."""
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
    """Print the address of a page on 127.0.0.1 and ask for votes there until interrupted (KeyboardInterrupt).

    Raises:
        InputError: there is nothing to vote on, or the file cannot be written or holds something else.
        RewardError: the port is not available.
    """
    pairs, file = pairs_of(folders), file or folders[0] / "votes.jsonl"
    with _lock(file):
        ballot = Ballot(pairs, file)
        listening = guard.listen("127.0.0.1", port, None)
        app = application(ballot, folders[0].resolve().name)
        print_line(f"votes    {ballot.file}")
        print_line(f"page     http://127.0.0.1:{listening.getsockname()[1]}/")
        uvicorn.Server(guard.configure(app)).run(sockets=[listening])
        raise KeyboardInterrupt  # uvicorn returns for no other reason


@contextmanager
def _lock(file: Path) -> Iterator[None]:
    """Lock a file of votes, or raise InputError if another process holds the lock; it ends with the process."""
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
