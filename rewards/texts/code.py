"""Rewards of programs: the share of unit tests that a program in the text passes, run in the sandbox, and its format."""

from __future__ import annotations

import ast
import os
import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from rewards.base import RewardError
from rewards.sandbox import sandbox
from rewards.texts.text import Scores

_PAUSES = (0.5, 2.0)  # seconds before a sandbox that could not start is tried again
_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)


def program_of(text: str, bare: bool | None = False) -> str | None:
    """The last fenced block of Python in a text (or, `bare`, the whole text); None if there is none."""
    if bare:
        return text if text.strip() else None
    blocks = _BLOCK.findall(text)
    return blocks[-1] if blocks else None


def code_format(texts: Sequence[str], prompts: Sequence[str], bare: Sequence | None = None) -> list[float]:
    """1 for a program that parses, 0.5 for one that does not, 0 for none (DiffuCoder, 2506.20639)."""
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

    The program is the last block of Python in the text, or the whole text where the column `bare` is true. It is loaded and
    its tests (the column `tests`, a list of statements such as "assert double(2) == 4") are tried one after the other, all
    within `seconds`; where their truth rests on the program's process alone, in a second process once more. What literals
    it is compared with never enters, and a program that is found cheating scores 0 (`rewards/sandbox/examination.py`). It
    finds no input; once it has asked for some, statements at its top that fail are passed over. A row whose column `tests`
    is None does not concern the reward.

    It runs in a sandbox of the Linux kernel. It may import the standard library and has an empty folder of 16 MB and 1,000
    files; a new process or thread, a signal to another, memory beyond `megabytes`, more in its folder, any other file but
    Python's own, and any socket are refused, which the program sees as an exception; a program that does not end is killed.
    What it breaks is its own score. Whether this machine can refuse all that is tried out when the reward is made, with
    real attempts; where it cannot, the reward is refused unless `unsafe` names what is missing. Nothing is run while a
    layer that was there then is not.

    Args:
        seconds: for loading and all tests of one text, in each process.
        megabytes: of memory for each program.
        unsafe: protections to do without where this machine cannot give them, of `processes`, `memory`, `files`,
            `disk`, `network`.
        workers: programs run at the same time; by default one per processor.

    Raises:
        RewardError: a protection is missing that `unsafe` does not name, or nothing can be run, at the start or later.
    """

    def __init__(
        self, seconds: float = 5.0, megabytes: int = 512, unsafe: Sequence[str] = (), workers: int | None = None
    ):
        self.limits = sandbox.Limits(seconds, megabytes)
        self.workers = workers or os.cpu_count()
        unknown = [name for name in unsafe if name not in sandbox.PROTECTIONS]
        if unknown:
            raise RewardError(f"code: unsafe names {unknown[0]!r}; choose of {', '.join(sandbox.PROTECTIONS)}")
        try:
            lacking = sandbox.missing(self.limits)
            tried = sandbox.run("", [], self.limits).layers
        except sandbox.SandboxError as error:
            raise RewardError(f"code: {error}") from None
        self.layers = [layer for layer, said in tried.items() if said is None]
        refused = [name for name in lacking if name not in unsafe]
        if refused:
            raise RewardError(
                f"code: this machine cannot shield {', '.join(refused)} from the programs a model writes "
                f"({lacking[refused[0]] or 'no layer said why'}); only if you trust them, "
                f"set the option unsafe: [{', '.join(refused)}]"
            )

    def __call__(
        self, texts: Sequence[str], prompts: Sequence[str], tests: Sequence, bare: Sequence | None = None
    ) -> Scores:
        """Scores of B texts; `tests` holds B lists of Python statements, such as "assert double(2) == 4"."""
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
        """What the sandbox says; a machine that is busy, or short of something, is asked again."""
        pauses = iter(_PAUSES)
        while True:
            try:
                return sandbox.run(program, tests, self.limits, needed=self.layers)
            except sandbox.SandboxError as error:
                pause = next(pauses, None)
                if pause is None:
                    raise RewardError(f"code: {error}") from None
                time.sleep(pause)
