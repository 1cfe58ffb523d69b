"""Compare answers to mathematics by computer algebra: math-verify in its own process."""

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

from rewards.base import RewardError
from rewards.texts import latex
from rewards.texts.text import Scores, final_answer

_WORKER = Path(__file__).with_name("algebra_worker.py")
_LONGEST = 2000  # characters; a longer answer is wrong
_REMEMBERED = 4096  # pairs of answers; the samples of a prompt often agree


class MathVerify:
    r"""1 where math-verify finds the final answer of a text equal to the right one, else 0.

    The answer is that of `math_accuracy`, the last \boxed or `final_answer`. math-verify also equates 2x + 2 and 2(x + 1),
    or \{1, 2\} and \{2, 1\}. A row whose right answer it cannot parse scores None. An answer that takes longer than
    `seconds` or more than `megabytes` is wrong: a model can write 9^{9^{9^9}}.

        rewards: [{use: math_verify, weight: 2}, {use: tags}]

    Args:
        seconds: for each pair of answers.
        megabytes: of address space of the comparing process.
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
        self._same = lru_cache(_REMEMBERED)(self._ask)

    def __call__(self, texts: Sequence[str], prompts: Sequence[str], answer: Sequence) -> Scores:
        r"""Return one score per text; `answer` has bare answers, or solutions with the answer in the last \boxed."""
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
        same = self._same(expected.strip(), given.strip())
        return None if same is None else float(same)

    def _ask(self, expected: str, given: str) -> bool | None:
        with self._lock:
            process = self._process or self._start()
            assert process.stdin is not None
            assert process.stdout is not None
            line = ""
            with suppress(BrokenPipeError):
                process.stdin.write(json.dumps([expected, given]) + "\n")
                process.stdin.flush()
                line = process.stdout.readline()
            if not line:  # it took too much time or memory
                self._end()
                return False
            return json.loads(line)

    def _start(self) -> subprocess.Popen[str]:
        self._process = process = subprocess.Popen(
            [sys.executable, "-P", str(_WORKER), str(self._seconds), str(self._megabytes)],  # -P: not this folder
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
            env={"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONHASHSEED": "0", "PATH": os.defpath},
        )
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        if line != "ready":
            self._end()
            raise RewardError(f"math_verify: math-verify cannot be started here ({line or 'its process ended'})")
        return process

    def _end(self) -> None:
        process, self._process = self._process, None
        assert process is not None
        process.kill()
        with suppress(BrokenPipeError), process:  # closes the pipes, one of which may hold unwritten bytes
            pass
