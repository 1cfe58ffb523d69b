"""Answers to mathematics compared by computer algebra: math-verify, in a process of its own."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import IO

from rewards.base import RewardError
from rewards.texts import latex
from rewards.texts.text import Scores, final_answer

_WORKER = Path(__file__).with_name("algebra_worker.py")
_LONGEST = 2000  # characters of an answer that is compared; a longer one is wrong
_REMEMBERED = 4096  # pairs of answers; the samples of a prompt often agree


class MathVerify:
    r"""1 where math-verify finds the final answer of a text the same as the right one, 0 otherwise.

    The answer is read as `math_accuracy` reads it, the last \boxed or what `final_answer` finds, and compared by
    math-verify: 2x + 2 is 2(x + 1), and \{1, 2\} is \{2, 1\}. A row whose right answer math-verify cannot read does not
    concern the reward. An answer that takes it longer than `seconds`, or more than `megabytes`, is wrong: a model can
    write 9^{9^{9^9}}.

        rewards: [{use: math_verify, weight: 2}, {use: tags}]

    Args:
        seconds: for each pair of answers.
        megabytes: of address space of the process that compares.

    Raises:
        RewardError: math-verify is not installed, an option is wrong, or the process does not start.
    """

    def __init__(self, *, seconds: float = 5.0, megabytes: int = 4096) -> None:
        if find_spec("math_verify") is None:
            raise RewardError(
                "math_verify: math-verify is not installed, pip install 'flowgrpo[math]'; or use math_accuracy"
            )
        for name, value in (("seconds", seconds), ("megabytes", megabytes)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise RewardError(f"math_verify: {name} is {value!r}, but must be a number above 0")
        self._seconds, self._megabytes = seconds, int(megabytes)
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()
        self._same = lru_cache(_REMEMBERED)(self._asked)

    def __call__(self, texts: Sequence[str], prompts: Sequence[str], answer: Sequence) -> Scores:
        r"""One score per text.

        Args:
            answer: B answers, alone or as MATH's column `solution` has them, in the last \boxed.
        """
        return [
            None if right is None else self._score(text, str(right)) for text, right in zip(texts, answer, strict=True)
        ]

    def __del__(self) -> None:
        if getattr(self, "_process", None) is not None:
            self._end()

    def _score(self, text: str, right: str) -> float | None:
        expected, given = latex.last_boxed(right) or right, latex.last_boxed(text)
        given = final_answer(text) if given is None else given
        if given is None or len(given) > _LONGEST:
            given = ""
        said = self._same(expected.strip(), given.strip())
        return None if said is None else float(said)

    def _asked(self, expected: str, given: str) -> bool | None:
        with self._lock:
            process = self._process or self._started()
            questions, answers = _pipes(process)
            line = ""
            with suppress(BrokenPipeError):
                questions.write(json.dumps([expected, given]) + "\n")
                questions.flush()
                line = answers.readline()
            if not line:  # it took too long, or too much
                self._end()
                return False
            return json.loads(line)

    def _started(self) -> subprocess.Popen[str]:
        self._process = process = subprocess.Popen(
            [sys.executable, "-P", str(_WORKER), str(self._seconds), str(self._megabytes)],  # -P: without this folder
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
            env={"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONHASHSEED": "0", "PATH": os.defpath},
        )
        said = _pipes(process)[1].readline().strip()
        if said != "ready":
            self._end()
            raise RewardError(f"math_verify: math-verify cannot be started here ({said or 'its process ended'})")
        return process

    def _end(self) -> None:
        process, self._process = self._process, None
        assert process is not None
        process.kill()
        process.wait()
        questions, answers = _pipes(process)
        answers.close()
        with suppress(BrokenPipeError):  # of what was not written
            questions.close()


def _pipes(process: subprocess.Popen[str]) -> tuple[IO[str], IO[str]]:
    """Where questions go, and answers come from."""
    assert process.stdin is not None
    assert process.stdout is not None
    return process.stdin, process.stdout
