"""Which pipelines of tests/zoo compute by graphs (`model.cuda_graphs`), as far as a CPU can tell.

    python research/captured_models.py [WORD ...]      # those with a word in their name; all take 2 minutes

Each takes the steps of its schedule five times: once by calls, then with the captures of tests/taped.py, which repeat
recorded operations in place of a GPU. It prints whether calls were replayed, whether all numbers are equal, and the reason
of a network that goes on without graphs.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections import Counter
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from taped import capture  # noqa: E402
from zoo import SPECIMENS, Specimen  # noqa: E402

from flowgrpo.flow.pipeline.networks import captured_calls  # noqa: E402
from flowgrpo.flow.pipeline.policy import DiffusersPolicy  # noqa: E402


class Reasons(logging.Handler):
    """Keeps what the captured calls warn of."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a message from the reason on."""
        self.told.append(record.getMessage().partition("because ")[2])


def walk(policy: DiffusersPolicy, specimen: Specimen) -> torch.Tensor:
    """Return all velocities of short steps from the first row."""
    rows, found = specimen.rows[:1], []
    state = policy.start(rows)
    for sigma in policy.sigmas[:-1]:
        velocity = policy.velocity(state, sigma, rows)
        found += [part.flatten().float() for part in velocity]
        state = tuple(x + 0.1 * v.to(x.dtype) for x, v in zip(state, velocity, strict=True))
    return torch.cat(found)


@torch.no_grad()
def result(specimen: Specimen, reasons: Reasons) -> tuple[str, str]:
    """Return `replayed`, `called`, or `unequal` if a number differs; and why calls were not replayed."""
    reasons.told.clear()
    policy = DiffusersPolicy(specimen.build(), specimen.call)
    policy.prepare(specimen.rows[:1])
    expected = walk(policy, specimen)
    captured = captured_calls.CapturedCalls(policy.modules.values(), capture)
    equal = all(torch.equal(walk(policy, specimen), expected) for _ in range(4))
    why = "" if captured.replays else (reasons.told or ["no call comes twice"])[0]
    return ("called" if why else "replayed") if equal else "unequal", why


def main(words: list[str]) -> None:
    """Print a line for each pipeline, and the counts."""
    warnings.filterwarnings("ignore")
    for name in ("diffusers", "transformers"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    reasons = Reasons()
    captured_calls.LOGGER.addHandler(reasons)
    captured_calls.LOGGER.propagate = False
    counts: Counter[str] = Counter()
    for name, specimen in SPECIMENS.items():
        if words and not any(word in name for word in words):
            continue
        try:
            found, why = result(specimen, reasons)
        except Exception as error:  # a pipeline that does not run in steps from one row
            found, why = "not run", f"{type(error).__name__}: {' '.join(str(error).split())[:100]}"
        counts[found] += 1
        print(f"{name}: {found}{why and ', '}{why}", flush=True)
    print(", ".join(f"{count} {found}" for found, count in counts.most_common()))


if __name__ == "__main__":
    main(sys.argv[1:])
