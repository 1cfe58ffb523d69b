"""Call engines on all processes together, and report how far their log-probabilities are from the policy's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast

from flowgrpo.training.run.stop_reasons import EngineLost
from flowgrpo.training.state import RunState
from flowgrpo_engine.mismatch import FAR, Mismatch, metrics
from flowgrpo_engine.service import EngineError
from samplers import noise

T = TypeVar("T")


class Pushes(Protocol):
    """Sender of weights to engines, which verifies that they used them."""

    def push(self) -> object:
        """Send the current weights."""

    def verify(self) -> object:
        """Raise an `EngineError` if an engine used other weights."""


def ask_engine(run: RunState, ask: Callable[[], T]) -> T:
    """Call `ask` on all processes together and return its result.

    Raises:
        EngineLost: `ask` raised an EngineError on some process. It is raised on all of them; the loop writes a checkpoint.
    """
    answer: T | None = None
    problem: str | None = None
    try:
        answer = ask()
    except EngineError as error:
        problem = str(error)
    problems = [each for each in run.collectives.gather([problem]) if each is not None]
    if problems:
        raise EngineLost(f"stopped after step {run.done}: {problems[0]}", "")
    return cast("T", answer)


def on_main(run: RunState, ask: Callable[[], T]) -> T | None:
    """Call `ask` on the main process alone and return its result, None on the others; errors as of `answered`."""
    return ask_engine(run, ask if run.accelerator.is_main_process else lambda: None)


def roll_out(run: RunState, adapters: Pushes, roll: Callable[[], T]) -> T:
    """Push the current weights, call `roll`, verify that the engines used these weights, and return the result.

    Raises:
        EngineLost: an engine is gone, or did something else; raised on all processes.
    """
    on_main(run, adapters.push)
    result = ask_engine(run, roll)
    on_main(run, adapters.verify)
    return result


def report_mismatch(run: RunState, local: Mismatch, *, unit: str, same: str) -> dict[str, Any]:
    """Return the metrics of the mismatch over all processes, and warn of a large one.

    Args:
        local: the mismatch on this process.
        unit: word for an entry of `Mismatch.each` in the warning.
        same: settings of the engine that may differ, in words for the warning.
    """
    line = metrics(run.collectives.gather_shards([local]))
    if (gap := line["engine/mean_abs_log_ratio"]) is not None and gap > FAR:
        run.report.warn(
            f"step {run.done + 1}: the engine's log-probabilities are {gap:.3g} nats per {unit} from the trainer's; "
            f"check that both use the same {same}"
        )
    return line


SEEDS = 2**48  # so that a seed plus a sample's index is an exact integer in any language


def seed_of(seed: int, iteration: int, group: int) -> int:
    """Return the seed of a group's first sample; sample i has this seed plus i, whichever request asks for it.

    Args:
        seed: the run's seed.
    """
    return int(noise.generator(seed, "engine", iteration, group).integers(SEEDS))
