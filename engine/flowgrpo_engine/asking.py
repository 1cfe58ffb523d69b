"""Ask engines on all processes together, and report how far their log-probabilities are from the policy's."""

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
    """Sends weights to an engine, and verifies that it used them."""

    def push(self) -> object:
        """Send the weights as they stand."""

    def verify(self) -> object:
        """Raise an `EngineError` if the engine used others."""


def answered(run: RunState, ask: Callable[[], T]) -> T:
    """Return what is asked of an engine; all processes ask together.

    Raises:
        EngineLost: it failed for some process; raised on all of them, and the loop writes a checkpoint.
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
    """Return what the main process alone asks of an engine, None on the others; errors as of `answered`."""
    return answered(run, ask if run.accelerator.is_main_process else lambda: None)


def rolled_out(run: RunState, adapters: Pushes, roll: Callable[[], T]) -> T:
    """Return what engines roll out by the weights as they stand: pushed before, and verified afterwards.

    Raises:
        EngineLost: an engine is gone, or did something else; on all processes.
    """
    on_main(run, adapters.push)
    rolled = answered(run, roll)
    on_main(run, adapters.verify)
    return rolled


def report_mismatch(run: RunState, own: Mismatch, *, unit: str, same: str) -> dict[str, Any]:
    """Return the metrics of the mismatch on all processes, and warn of a large one.

    Args:
        own: of this process.
        unit: of which `Mismatch.each` is one.
        same: what of an engine may differ.
    """
    found = metrics(run.collectives.gather_shares([own]))
    if (gap := found["engine/mean_abs_log_ratio"]) is not None and gap > FAR:
        run.report.warn(
            f"step {run.done + 1}: the engine's log-probabilities are {gap:.3g} nats per {unit} from ours; are its {same} "
            "the same?"
        )
    return found


SEEDS = 2**48  # so that a seed with the number of a sample stays a small integer in any language


def seed_of(seed: int, iteration: int, group: int) -> int:
    """Return the seed of the first sample of a group; sample i has it plus i, whatever request it is in.

    Args:
        seed: of the run.
    """
    return int(noise.generator(seed, "engine", iteration, group).integers(SEEDS))
