"""A run that asks engines: what ends it, on all processes together, and what it says of their log-probabilities."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from flowgrpo.training.engine.mismatch import FAR, Mismatch, metrics
from flowgrpo.training.engine.service import EngineError
from flowgrpo.training.loop import Loop
from flowgrpo.training.run.stop_reasons import EngineLost, EngineLostAlone
from samplers import noise

T = TypeVar("T")


def answered(loop: Loop, ask: Callable[[], T]) -> T:
    """What is asked of an engine; where it fails for some process, all of them write a checkpoint and stop.

    Raises:
        EngineLost: it failed, and all processes know it.
        EngineLostAlone: it failed where this process makes a rollout again, of which the others learn by its end.
    """
    problem: str | None = None
    try:
        answer = ask()
    except EngineError as error:
        problem = str(error)
    problems = [each for each in loop.collectives.gather([problem]) if each is not None]
    if problems:
        loop.keep_what_is_done()
        raise EngineLost(f"stopped after step {loop.done}: {problems[0]}", loop.rest())
    if problem is not None:  # the others have gone on
        raise EngineLostAlone(f"stopped after step {loop.done}: {problem}", loop.rest())
    return answer


def on_main(loop: Loop, ask: Callable[[], T]) -> T | None:
    """What the main process alone asks of an engine, None on the others; failures as of `answered`."""
    return answered(loop, ask if loop.accelerator.is_main_process else lambda: None)


def rolled_out(loop: Any, roll: Callable[[], T]) -> T:
    """What this process has engines roll out by the weights as they stand: pushed before, and verified behind.

    Args:
        loop: a run that has an engine.
        roll: ask for it.

    Raises:
        EngineLost: an engine is gone, or did something else; on all processes, with a checkpoint of what is done.
        EngineLostAlone: as of `answered`.
    """
    adapters = loop.engine.adapters
    on_main(loop, adapters.push)
    rolled = answered(loop, roll)
    on_main(loop, adapters.verify)
    return rolled


def told(loop: Loop, own: Mismatch, *, unit: str, same: str) -> dict[str, Any]:
    """The metrics of the mismatch on all processes, of which a large one is warned of.

    Args:
        own: of this process.
        unit: of which `Mismatch.each` is one.
        same: what of an engine may differ.
    """
    found = metrics(loop.collectives.gather_shares([own]))
    if (gap := found["engine/mean_abs_log_ratio"]) is not None and gap > FAR:
        loop.report.warn(
            f"step {loop.done + 1}: the engine's log-probabilities are {gap:.3g} nats per {unit} from ours; are its {same} "
            "the same?"
        )
    return found


SEEDS = 2**48  # so that a seed with the number of a sample stays a small integer in any language


def seed_of(seed: int, iteration: int, group: int) -> int:
    """The seed of the first sample of a group; sample i has it plus i, whatever request it is in.

    Args:
        seed: of the run.
    """
    return int(noise.generator(seed, "engine", iteration, group).integers(SEEDS))
