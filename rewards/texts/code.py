"""Rewards of programs: the share of unit tests that a program passes in the sandbox, and its format."""

from __future__ import annotations

import ast
import os
import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from rewards.base import RewardError
from rewards.sandbox import sandbox
from rewards.texts.text import Bare, Scores, Texts

_PAUSES = (0.5, 2.0)  # seconds before retries of a sandbox that did not start
_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)


def program_of(text: str, bare: bool | None = False) -> str | None:
    """Return the last fenced block of Python in a text, or the whole text if `bare`; None if there is none."""
    if bare:
        return text if text.strip() else None
    blocks = _BLOCK.findall(text)
    return blocks[-1] if blocks else None


def code_format(texts: Texts, prompts: Texts, bare: Bare = None) -> list[float]:
    """Return 1 for a program that parses, 0.5 for one that does not, 0 for none (DiffuCoder, 2506.20639)."""
    return [_format(program_of(*row)) for row in zip(texts, bare or [False] * len(texts), strict=True)]


def _format(program: str | None) -> float:
    if program is None:
        return 0.0
    try:
        ast.parse(program)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return 0.5
    return 1.0


class code:
    """Share of a row's tests that the program in its text passes, in [0, 1]; 0 where it does not parse, load or end.

    The program is the last block of Python in the text, or the whole text where the column `bare` is true. It is loaded,
    then its tests (the column `tests`, a list of statements such as "assert double(2) == 4") run one after the other, all
    within `seconds`; tests that only the program's own process can judge run again in a second process. Expected literals
    never enter the process, and a program caught cheating scores 0 (`rewards/sandbox/examination.py`). Its standard input
    is empty; once it has read from it, failing top-level statements are skipped. A row whose column `tests` is None scores
    None.

    It runs in a sandbox of the Linux kernel, with the standard library and an empty folder of 16 MB and 1,000 files. These
    are refused with an exception: new processes and threads, signals to others, memory beyond `megabytes`, a fuller folder,
    files other than Python's own, and sockets. A program that does not end is killed. The constructor tries each of
    these actions, and raises RewardError if this machine allows one, unless `unsafe` names the missing protection. Later, no
    program runs while a layer of the sandbox is missing that the constructor found in place.

    Args:
        seconds: for loading and all tests of one text, in each process.
        megabytes: of memory for each program.
        unsafe: protections to do without if this machine lacks them: `processes`, `memory`, `files`, `disk`, `network`.
        workers: concurrent programs; by default one per processor.
    """

    def __init__(
        self, seconds: float = 5.0, megabytes: int = 512, unsafe: Sequence[str] = (), workers: int | None = None
    ):
        self.limits = sandbox.Limits(seconds, megabytes)
        self.workers = workers or os.cpu_count()
        if unknown := [name for name in unsafe if name not in sandbox.PROTECTIONS]:
            raise RewardError(f"code: unsafe names {unknown[0]!r}; choose of {', '.join(sandbox.PROTECTIONS)}")
        try:
            lacking = sandbox.find_missing(self.limits)
            layers = sandbox.run("", [], self.limits).layers
        except sandbox.SandboxError as error:
            raise RewardError(f"code: {error}") from None
        self.layers = [layer for layer, error in layers.items() if error is None]
        if refused := [name for name in lacking if name not in unsafe]:
            raise RewardError(
                f"code: this machine cannot shield {', '.join(refused)} from the programs a model writes "
                f"({lacking[refused[0]] or 'no layer said why'}); only if you trust them, "
                f"set the option unsafe: [{', '.join(refused)}]"
            )

    def __call__(self, texts: Texts, prompts: Texts, tests: Sequence, bare: Bare = None) -> Scores:
        """Return B scores; `tests` has a list of Python statements for each text, such as "assert double(2) == 4"."""
        with ThreadPoolExecutor(self.workers) as pool:
            return list(pool.map(self._score, texts, bare or [False] * len(texts), tests))

    def _score(self, text: str, whole: bool | None, tests: Sequence[str] | None) -> float | None:
        if tests is None:
            return None
        if isinstance(tests, str) or not tests:
            raise ValueError(f"code takes a list of tests for each prompt, not {tests!r}")
        program = program_of(text, whole)
        if program is None or _format(program) < 1:
            return 0.0
        return sum(self._run(program, tests).passed) / len(tests)

    def _run(self, program: str, tests: Sequence[str]) -> sandbox.Outcome:
        """Run the program, and retry if the sandbox could not start."""
        pauses = iter(_PAUSES)
        while True:
            try:
                return sandbox.run(program, tests, self.limits, needed=self.layers)
            except sandbox.SandboxError as error:
                pause = next(pauses, None)
                if pause is None:
                    raise RewardError(f"code: {error}") from None
                time.sleep(pause)
