"""A sandbox for programs that a model wrote: the kernel limits them, and each limit is tested beforehand.

A program runs in its own process (`rewards/jail`) with limits on time, memory and file sizes. It may start no process or
thread, signal none, open no socket and no files but Python's own (reading) and those of an empty folder. Several layers
overlap: namespaces, a root folder in memory, an unprivileged user, dropped capabilities, Landlock, a seccomp filter and
limits. The sandbox uses those that the machine has, and `find_missing` tests that forbidden actions fail. Python's audit
hooks and removed builtins limit nothing, since a program in the same process can undo them.

`rewards/sandbox/examination.py` and docs/research/sandbox.md describe how far the score is safe from cheating.
"""

from __future__ import annotations

import functools
import json
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rewards.sandbox import examination, split_tests
from rewards.sandbox.examination import Cheating, Examiner
from rewards.sandbox.split_tests import Constants, SplitTest

_JAIL = Path(__file__).parents[1] / "jail"
_GRACE = 1.0  # seconds after the limit until the process is killed from outside
_LONGEST_REPLY = (1 << 20) + (1 << 10)  # bytes; replies of the jail are shorter
_GOODBYE = 0.1  # seconds for a process to end after the last question
_TIMED_OUT, _TIMED_OUT_STATUS = "timed out", 124  # exit status of a jail whose program took too long


class SandboxError(RuntimeError):
    """The sandbox cannot run anything. The message is one clear sentence."""


@dataclass(frozen=True)
class Limits:
    """Limits of one process: wall clock from its start, address space, and total size and number of its folder's files."""

    seconds: float = 5.0
    megabytes: int = 512
    disk_megabytes: int = 16
    files: int = 1000


@dataclass(frozen=True)
class Outcome:
    """The result of a program."""

    passed: tuple[bool, ...]  # one per test; all False for a program caught cheating
    problem: str | None = None  # why it did not load, how its process ended, or how it cheated
    # For each means of isolation, None if it was in place, or the kernel's error.
    layers: dict[str, str | None] = field(default_factory=dict)


def run(
    code: str,
    tests: Sequence[str],
    limits: Limits = Limits(),
    *,
    without: Sequence[str] = (),
    needed: Sequence[str] = (),
) -> Outcome:
    """Load a program in a sandboxed process and run each test in its namespace: Python statements, such as an assert.

    If a test ends the process or uses up the time, the tests after it fail. Output is lost, and input is empty. If a test
    passes by a claim of the process, all run again in another process (see `rewards/sandbox/examination.py`).

    Args:
        without: layers to leave out, for tests of the others; names as in `Outcome.layers`.
        needed: layers without which nothing runs; a machine short of resources may lose one for a while.

    Raises:
        SandboxError: Python does not start inside the sandbox, or a needed layer is not in place.
    """
    taken = [_split(test) for test in tests]
    known = _compute_constants(split_tests.constants(filter(None, taken)), limits, tuple(without), tuple(needed))

    def examine(unproved: Sequence[bool] | None = None) -> tuple[list[bool], list[bool], str | None, dict]:
        with _Process(limits, without, needed) as process:
            return *_examine(process, code, taken, known=known, unproved=unproved), process.layers

    passed, claimed, problem, layers = examine()
    unproved = [held and claim for held, claim in zip(passed, claimed, strict=True)]
    if any(unproved):
        again, _, second_problem, _ = examine(unproved)
        passed = [held and (twice or not claim) for held, twice, claim in zip(passed, again, claimed, strict=True)]
        if second_problem and second_problem.startswith(_CHEATED):
            passed, problem = [False] * len(taken), second_problem
    return Outcome(tuple(passed), problem, layers)


_CHEATED = "cheated: "


def _split(test: str) -> SplitTest | None:
    try:
        taken = split_tests.split(test)
        split_tests.constants([taken])  # fails if it is nested too deeply
        return taken
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


@functools.lru_cache(maxsize=4096)
def _compute_constants(
    constants: Constants, limits: Limits, without: tuple[str, ...], needed: tuple[str, ...]
) -> Mapping[str, Any]:
    """Return the values of constant expressions that are plain data, from a process without a program."""
    known: dict[str, Any] = {}
    if not constants.expressions:
        return known
    with _Process(limits, without, needed) as process:
        try:
            for statement in constants.imports:
                process.ask("do", statement)
            for expression in constants.expressions:
                outcome, value = process.ask("value", expression)
                if outcome == "value" and examination.is_plain(value):
                    known[expression] = value
        except (_Ended, Cheating):  # a test that breaks this process breaks the program's, too
            pass
    return known


def _examine(
    process: _Process,
    code: str,
    taken: Sequence[SplitTest | None],
    *,
    known: Mapping[str, Any],
    unproved: Sequence | None,
) -> tuple[list[bool], list[bool], str | None]:
    """Return whether each test passed, whether it passed by a claim of the process, and the `problem` of an `Outcome`.

    `unproved` tells a second process which tests passed by a claim of the first.
    """
    passed, claimed = [False] * len(taken), [False] * len(taken)
    examiner = Examiner(process.ask, known, second=unproved is not None)
    canaries = secrets.SystemRandom().choices(range(len(taken) + 1), k=examination.CANARIES)
    try:
        outcome, *why = process.ask("load", code)
        if outcome == "raised":
            return passed, claimed, str(*why)
        for i, test in enumerate([*taken, None]):
            for _ in range(canaries.count(i)):
                examiner.canary()
            if test is not None:
                passed[i], claimed[i] = examiner.passes(test, bool(unproved and unproved[i]))
    except _Ended as ended:
        return passed, claimed, str(ended)
    except Cheating as cheating:
        return [False] * len(taken), claimed, f"{_CHEATED}{cheating}"
    return passed, claimed, None


class _Ended(Exception):
    """A process has ended; the message says why."""


class _Process:
    """A context manager of a sandboxed process that answers questions; `layers` as in `Outcome`."""

    def __init__(self, limits: Limits, without: Sequence[str], needed: Sequence[str]):
        self._limits = limits
        self._deadline = time.monotonic() + limits.seconds + _GRACE
        self._place = tempfile.mkdtemp(prefix="flowgrpo-sandbox-")
        self._unread = b""
        job = {
            "place": os.path.realpath(self._place),
            "seconds": limits.seconds,
            "bytes": limits.megabytes << 20,
            "disk": limits.disk_megabytes << 20,
            "files": limits.files,
            "without": list(without),
            "needed": list(needed),
        }
        command = [sys.executable, "-S", "-s", "-P", str(_JAIL)]
        # An empty environment has no secrets; the seed fixes the order of sets.
        options: dict[str, Any] = {"env": {"PYTHONHASHSEED": "0"}, "cwd": "/", "start_new_session": True, "bufsize": 0}
        pipe = subprocess.PIPE
        try:
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, **options)
        except BaseException:
            _remove(self._place)
            raise
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._questions, self._replies = self._process.stdin, self._process.stdout
        try:
            os.set_blocking(self._questions.fileno(), False)
            self.layers = self._ready(job)
            self._check(needed)
        except BaseException:
            self._end()
            raise

    def __enter__(self) -> _Process:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def ask(self, kind: str, *sources: str) -> list[Any]:
        """Return the reply to a question of `rewards/jail/trial.py`. Raises _Ended without reply, Cheating if malformed."""
        nonce = secrets.token_hex(8)
        self._write([nonce, kind, *sources])
        try:
            answered, *reply = json.loads(self._line(), object_hook=examination.rebuild)
        except (TypeError, ValueError, ArithmeticError, RecursionError):
            raise Cheating("it wrote what was not asked for") from None
        if answered != nonce or [*reply[:1], len(reply)] not in _REPLIES[kind]:
            raise Cheating("it wrote what was not asked for")
        return reply

    def _ready(self, job: dict[str, Any]) -> dict[str, str | None]:
        line = ""
        try:
            self._write(job)
            while not line.startswith('{"layers"'):
                line = ""
                line = self._line().decode(errors="replace")
        except _Ended as ended:
            rest = " ".join(self._unread.decode(errors="replace").splitlines()[-1:])
            late = f"it was not ready after {self._limits.seconds:g} seconds" if str(ended) == _TIMED_OUT else ""
            reason = late or rest or str(ended).removeprefix("ended with ")
            raise SandboxError(f"the sandbox cannot start Python here: {reason}") from None
        return json.loads(line)["layers"]

    def _check(self, needed: Sequence[str]) -> None:
        for layer in needed:
            error = self.layers.get(layer, "not tried")
            if error is not None:
                raise SandboxError(f"the sandbox lost {layer} ({error}), and runs nothing")

    def _write(self, message: Any) -> None:
        rest = memoryview(json.dumps(message).encode() + b"\n")
        while rest:
            self._wait(self._questions.fileno(), select.POLLOUT)
            try:
                rest = rest[os.write(self._questions.fileno(), rest) :]
            except BlockingIOError:  # less room than an atomic write needs
                time.sleep(0.001)
            except BrokenPipeError:
                self._raise_ended()

    def _line(self) -> bytes:
        while b"\n" not in self._unread:
            if len(self._unread) > _LONGEST_REPLY:
                raise Cheating("it writes without end")
            self._wait(self._replies.fileno(), select.POLLIN)
            chunk = os.read(self._replies.fileno(), 1 << 16)
            if not chunk:
                self._raise_ended()
            self._unread += chunk
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _wait(self, descriptor: int, event: int) -> None:
        left = self._deadline - time.monotonic()
        poll = select.poll()
        poll.register(descriptor, event)
        if left <= 0 or not poll.poll(left * 1000):
            raise _Ended(_TIMED_OUT)

    def _raise_ended(self) -> None:
        """Raise _Ended with the reason why the process ended, after it has closed its pipes."""
        try:
            status = self._process.wait(max(0.0, self._deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            status = _TIMED_OUT_STATUS
        raise _Ended(_TIMED_OUT if status == _TIMED_OUT_STATUS else f"ended with status {status}")

    def _end(self) -> None:
        self._questions.close()
        try:
            self._process.wait(_GOODBYE)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._replies.close()
        _remove(self._place)


_REPLIES = {
    "load": (["done", 1], ["raised", 2]),
    "do": (["done", 1], ["raised", 2]),
    "value": (["value", 2], ["raised", 2]),
    "claim": (["claim", 3], ["raised", 2]),
    "pair": (["pair", 5], ["raised", 2]),
}


def _remove(place: str) -> None:
    """Delete a program's folder, also if it made folders in it unreadable."""
    os.chmod(place, 0o700)
    for above, folders, _ in os.walk(place):
        for folder in folders:
            path = os.path.join(above, folder)
            if not os.path.islink(path):
                os.chmod(path, 0o700)
    shutil.rmtree(place, ignore_errors=True)


# What a program must not be able to do, as a program that tries and its tests.
_ATTEMPTS = """
import mmap, os, socket

def refused(action, *arguments):
    try:
        action(*arguments)
    except (OSError, MemoryError):
        return True
    return False

def fork():
    if os.fork() == 0:
        os._exit(0)

def connect(kind):
    with socket.socket(socket.AF_INET, kind) as caller:
        caller.settimeout(1)
        caller.connect(("127.0.0.1", PORT))
        caller.send(b"x")

def fill(folder, count, size):
    os.mkdir(folder)
    for i in range(count):
        with open(f"{folder}/{i}", "wb") as file:
            if size:
                os.posix_fallocate(file.fileno(), 0, size)
"""
_MUST_HOLD = {  # memory is not touched, so that a granted request costs nothing
    "processes": "assert refused(fork) and refused(os.kill, PARENT, 0)",
    "memory": "assert refused(bytes, 2 * BYTES) and refused(mmap.mmap, -1, 2 * BYTES)",
    "files": "assert all(refused(open, SECRET, mode) for mode in ('r', 'a', 'w')) and refused(os.truncate, SECRET, 0)"
    " and refused(open, SECRET + '2', 'w') and refused(os.listdir, os.path.dirname(SECRET))",
    "disk": "assert refused(fill, 'large', 3, DISK // 2) and refused(fill, 'many', FILES + 1, 0)",
    "network": "assert refused(connect, socket.SOCK_STREAM) and refused(connect, socket.SOCK_DGRAM)",
}
PROTECTIONS = tuple(_MUST_HOLD)


def find_missing(limits: Limits = Limits(), without: Sequence[str] = ()) -> dict[str, str]:
    """Return the protections that this machine cannot give, each with its layers' errors; empty if the sandbox is whole.

    A program inside tries to fork, signal this process, allocate, open a file outside and connect to a port. A SandboxError
    is raised if it cannot even try.
    """
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as listener:
        os.chmod(folder, 0o777)  # so that only the sandbox refuses
        secret = Path(folder) / "secret"
        secret.write_text("a secret")
        secret.chmod(0o666)
        known = {
            "PARENT": os.getpid(),
            "BYTES": limits.megabytes << 20,
            "DISK": limits.disk_megabytes << 20,
            "FILES": limits.files,
            "SECRET": str(secret),
            "PORT": listener.getsockname()[1],
        }
        code = "".join(f"{name} = {value!r}\n" for name, value in known.items()) + _ATTEMPTS
        outcome = run(code, ["open('own', 'w').write('x')", *_MUST_HOLD.values()], limits, without=without)
    if not outcome.passed[0]:
        raise SandboxError(f"the sandbox cannot run a program here: {outcome.problem or 'its folder is not writable'}")
    reasons = "; ".join(f"{layer}: {said}" for layer, said in outcome.layers.items() if said is not None)
    return {name: reasons for name, holds in zip(PROTECTIONS, outcome.passed[1:], strict=True) if not holds}
