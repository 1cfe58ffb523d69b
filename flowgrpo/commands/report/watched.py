"""Rewards that a run only watches, and the warnings of its watch for reward hacking."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flowgrpo.commands.page_parts.history import Metrics, of_phase
from flowgrpo.training.reports.reward_hacking import find_overoptimized, overoptimization_streak

NONE = (
    "No reward is only watched, so nothing here tells whether the trained one is exploited. Name one in eval_rewards that a "
    "shortcut does not also raise, and the run watches it."
)


@dataclass(frozen=True)
class Watched:
    """First and last held-out mean of a reward that is only watched.

    `streak` counts the last evaluations in a row in which it fell while the trained total rose.
    """

    name: str
    first: float
    last: float
    streak: int


@dataclass(frozen=True)
class Verdict:
    """Warnings of the watch after the last evaluation; `sentence` is shown if there are none."""

    watched: list[Watched]
    alarms: list[str]
    sentence: str


def verdict(metrics: Metrics, names: Sequence[str], times: int) -> Verdict:
    """Return the state of the watch after the last evaluation; it warns of a `Watched.streak` of at least `times`."""
    if not names:
        return Verdict([], [], NONE)
    evaluated = of_phase(metrics, "eval")
    trained = [line.get("reward/mean") for line in evaluated]
    watched = []
    for name in names:
        values = [line.get(f"reward/{name}/mean") for line in evaluated]
        known = [value for value in values if value is not None]
        if known:
            watched.append(Watched(name, known[0], known[-1], overoptimization_streak(trained, values)))
    alarms = find_overoptimized(evaluated, names, times)
    if len(evaluated) < 2:
        return Verdict(watched, alarms, "The watch compares evaluations, and there are not two yet.")
    row = "" if times == 1 else f" {times} evaluations in a row"
    return Verdict(watched, alarms, f"No warning: no watched reward fell while the trained reward rose{row}.")
