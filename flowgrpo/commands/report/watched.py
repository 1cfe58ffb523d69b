"""The rewards that a run only watches, and what the watch for reward hacking says of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flowgrpo.commands.report.cost import Lines
from flowgrpo.training.reports.reward_hacking import overoptimization_streak, overoptimized

NONE = (
    "No reward is only watched, so nothing here tells whether the trained one is exploited. Name one in eval_rewards that a "
    "shortcut does not also raise, and the run watches it."
)


@dataclass(frozen=True)
class Watched:
    """A reward that is only watched.

    Attributes:
        first, last: its held-out means.
        streak: evaluations in a row, up to the last, in which it fell while the trained reward rose.
    """

    name: str
    first: float
    last: float
    streak: int


@dataclass(frozen=True)
class Verdict:
    """What the watch says after the last evaluation.

    Attributes:
        alarms: its warnings.
        sentence: what it says where it does not warn.
    """

    watched: list[Watched]
    alarms: list[str]
    sentence: str


def verdict(lines: Lines, names: Sequence[str], times: int) -> Verdict:
    """Return what the run's own watch says of its last evaluation.

    Args:
        names: of the rewards that are only watched.
        times: evaluations in a row from which on it warns.
    """
    if not names:
        return Verdict([], [], NONE)
    evaluated = [line for line in lines if line["phase"] == "eval"]
    trained = [line.get("reward/mean") for line in evaluated]
    watched = []
    for name in names:
        values = [line.get(f"reward/{name}/mean") for line in evaluated]
        known = [value for value in values if value is not None]
        if known:
            watched.append(Watched(name, known[0], known[-1], overoptimization_streak(trained, values)))
    alarms = overoptimized(evaluated, names, times)
    if len(evaluated) < 2:
        return Verdict(watched, alarms, "The watch compares evaluations, and there are not two yet.")
    row = "" if times == 1 else f" {times} evaluations in a row"
    return Verdict(
        watched, alarms, f"The watch does not warn: it does where one falls while the trained reward rises{row}."
    )
