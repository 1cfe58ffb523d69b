"""A sandbox for programs that a model wrote: the kernel limits what they may do, and each limit is tried out beforehand.

A program runs in a process of its own (`rewards/jail`) with a limit on time, memory and file sizes, which may start no
process or thread, signal none, open no socket and no file but Python's own (reading) and those of an empty folder.
Namespaces, a root folder in memory, an unprivileged user, dropped capabilities, Landlock, a seccomp filter and limits each
do part of it, and overlap: whatever the machine has is used, and `missing` attempts what must fail. Python's audit hooks and
removed builtins are no such thing: a program in the same process can undo them.

It keeps the machine safe from the answer, not the score: a program that hunts through the memory of its own process for the
tokens of its tests, or returns an object that equals everything, passes them.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_JAIL = Path(__file__).parent / "jail"
_GRACE = 1.0  # seconds after which the process is ended from outside, if it was not from inside
_LONGEST_OUTPUT = 1 << 16  # bytes that a pipe holds: the tokens of 3,000 tests
_TIMED_OUT = 124  # exit status of a jail that ended its program for taking too long


class SandboxError(RuntimeError):
    """The sandbox cannot run anything at all. The message is one clear sentence."""


@dataclass(frozen=True)
class Limits:
    """What one program may use: wall clock from the start of its process, address space, and files in its folder."""

    seconds: float = 5.0
    megabytes: int = 512
    disk_megabytes: int = 16


@dataclass(frozen=True)
class Outcome:
    """What became of a program.

    Attributes:
        passed: for each test, whether it raised nothing.
        problem: why the program itself did not load, or None; "timed out" if it was ended.
        layers: for each means of isolation, None where it was in place, or what the kernel said.
    """

    passed: tuple[bool, ...]
    problem: str | None = None
    layers: dict[str, str | None] = field(default_factory=dict)


def run(
    code: str,
    tests: Sequence[str],
    limits: Limits = Limits(),
    without: Sequence[str] = (),
    needed: Sequence[str] = (),
) -> Outcome:
    """Load a program and try each test (Python statements, such as an assert) in its names, all in one sandboxed process.

    Tests after one that ends the process or uses up the time have failed. What the program prints is lost. There may be
    3,000 tests.

    Args:
        without: layers to leave out, to see what the others hold; names as in `Outcome.layers`.
        needed: layers without which nothing is run; a machine that is short of something may lose one for a while.

    Raises:
        SandboxError: Python does not start inside the sandbox, or a needed layer is not in place.
    """
    tokens = [secrets.token_hex(8) for _ in tests]
    place = tempfile.mkdtemp(prefix="flowgrpo-sandbox-")
    megabyte = 1 << 20
    job = {
        "code": code,
        "place": os.path.realpath(place),
        "seconds": limits.seconds,
        "bytes": limits.megabytes * megabyte,
        "disk": limits.disk_megabytes * megabyte,
        "without": list(without),
        "needed": list(needed),
    }
    try:
        with tempfile.TemporaryFile() as given:
            given.write(f"{json.dumps(job)}\n{json.dumps(list(zip(tests, tokens, strict=True)))}\n".encode())
            given.seek(0)
            status, lines = _ended(given, limits.seconds + _GRACE)
    finally:
        _remove(place)
    outcome = _read(lines, tokens, status, limits)
    lost = [layer for layer in needed if outcome.layers.get(layer, "not tried") is not None]
    if lost:
        raise SandboxError(f"the sandbox lost {lost[0]} ({outcome.layers.get(lost[0], 'not tried')}), and runs nothing")
    return outcome


def _remove(place: str) -> None:
    """Delete a program's folder, and the folders in it that it made unreadable."""
    os.chmod(place, 0o700)
    for above, folders, _ in os.walk(place):
        for folder in folders:
            path = os.path.join(above, folder)
            if not os.path.islink(path):
                os.chmod(path, 0o700)
    shutil.rmtree(place, ignore_errors=True)


def _ended(given: Any, seconds: float) -> tuple[int, list[str]]:
    """Run the jail: its exit status, `_TIMED_OUT` where it had to be killed, and what it wrote.

    Its output is a pipe that is read when it has ended: what is written stands, and a flood stops at the pipe's size.
    """
    command = [sys.executable, "-S", "-s", "-P", str(_JAIL)]
    # An empty environment carries no secrets; the seed makes the order of a set the same for every sample.
    options = {"env": {"PYTHONHASHSEED": "0"}, "cwd": "/", "start_new_session": True}
    with subprocess.Popen(
        command, stdin=given, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, bufsize=0, **options
    ) as process:
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = _TIMED_OUT
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
        os.set_blocking(process.stdout.fileno(), False)
        said = process.stdout.read(_LONGEST_OUTPUT) or b""
    return status, said.decode(errors="replace").splitlines()


def _read(lines: list[str], tokens: list[str], status: int, limits: Limits) -> Outcome:
    start = next((i for i, line in enumerate(lines) if line.startswith('{"layers"')), None)
    if start is None:
        said = f"it was not ready after {limits.seconds:g} seconds" if status == _TIMED_OUT else " ".join(lines[-1:])
        raise SandboxError(f"the sandbox cannot start Python here: {said or f'status {status}'}")
    problem = next((line.removeprefix("! ") for line in lines[start:] if line.startswith("! ")), None)
    if status == _TIMED_OUT:
        problem = "timed out"
    elif status != 0:
        problem = f"ended with status {status}"
    return Outcome(tuple(token in lines for token in tokens), problem, json.loads(lines[start])["layers"])


# What a program must not be able to do, as tests of a program that tries.
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
"""
_MUST_HOLD = {  # memory is asked for and not touched, so that trying costs nothing where it is granted
    "processes": "assert refused(fork) and refused(os.kill, PARENT, 0)",
    "memory": "assert refused(bytes, 2 * BYTES) and refused(mmap.mmap, -1, 2 * BYTES)",
    "files": "assert all(refused(open, SECRET, mode) for mode in ('r', 'a', 'w')) and refused(os.truncate, SECRET, 0)"
    " and refused(open, SECRET + '2', 'w') and refused(os.listdir, os.path.dirname(SECRET))",
    "network": "assert refused(connect, socket.SOCK_STREAM) and refused(connect, socket.SOCK_DGRAM)",
}
PROTECTIONS = tuple(_MUST_HOLD)


def missing(limits: Limits = Limits(), without: Sequence[str] = ()) -> dict[str, str]:
    """The protections that this machine cannot give, each with what its layers said; empty where the sandbox is whole.

    Found by trying: a program inside forks, signals this process, allocates, opens a file outside and connects to a port.

    Raises:
        SandboxError: Python does not start inside the sandbox, or the program cannot even try.
    """
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as listener:
        os.chmod(folder, 0o777)  # so that only the sandbox refuses
        secret = Path(folder) / "secret"
        secret.write_text("a secret")
        secret.chmod(0o666)
        known = {
            "PARENT": os.getpid(),
            "BYTES": limits.megabytes << 20,
            "SECRET": str(secret),
            "PORT": listener.getsockname()[1],
        }
        code = "".join(f"{name} = {value!r}\n" for name, value in known.items()) + _ATTEMPTS
        outcome = run(code, [*_MUST_HOLD.values(), "open('own', 'w').write('x')"], limits, without)
    if not outcome.passed[-1]:
        raise SandboxError(f"the sandbox cannot run a program here: {outcome.problem or 'its folder is not writable'}")
    reasons = "; ".join(f"{layer}: {said}" for layer, said in outcome.layers.items() if said is not None)
    return {
        name: reasons for name, holds in zip(PROTECTIONS, outcome.passed[: len(PROTECTIONS)], strict=True) if not holds
    }
