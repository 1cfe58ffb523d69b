"""Statistics of groups and of the policy by iteration: what a run measured of how well it learns."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from flowgrpo.commands.gallery.curve import PART, curve
from flowgrpo.commands.gallery.numbers import number
from flowgrpo.commands.report.cost import Lines
from flowgrpo.commands.report.curves import points

# Key in the metric lines, name, and what it is.
KNOWN = (
    ("groups/zero_std_fraction", "zero-variance groups", "share of groups whose rewards are all alike"),
    ("groups/left_out_fraction", "left out", "share of units that the selection left out"),
    ("policy/loss", "loss", "of the objective over final samples, without divergences"),
    (
        "policy/clip_fraction",
        "clip fraction",
        "share of trained steps that the objective stopped",
    ),
    ("policy/clip_fraction_high", "clip fraction above", "of these, those with a ratio above 1"),
    ("policy/clip_fraction_low", "clip fraction below", "of these, those with a ratio below 1"),
    ("policy/mean_abs_log_ratio", "log-ratio", "mean size over the trained steps of the iteration"),
    ("policy/max_abs_log_ratio", "drift", "largest size of a log-ratio before the first update"),
    ("policy/kl", "KL", "to the reference, mean over the trained steps"),
    ("policy/grad_norm", "gradient norm", "largest of the iteration's updates, before it is clipped"),
    ("policy/learning_rate", "learning rate", "at the last update of the iteration"),
    ("reward/lost", "lost samples", "whose reward failed, or that are not finite"),
    ("policy/skipped_updates", "skipped updates", "whose gradient is not finite"),
)
RATIO = (
    "policy/clip_fraction",
    "policy/clip_fraction_high",
    "policy/clip_fraction_low",
    "policy/mean_abs_log_ratio",
)  # 0 in all lines where the objective has no ratio
COUNTS = ("reward/lost", "policy/skipped_updates")  # told only where there are any


@dataclass(frozen=True)
class OfStep:
    """A step of the schedule, counted from 1: means over the iterations that trained on it; None where not measured."""

    step: int
    log_ratio: float
    kl: float | None


@dataclass(frozen=True)
class Signal:
    """One statistic by iteration.

    Attributes:
        meaning: what it is, in words.
        values: (iteration, value) where it was measured, at least one.
    """

    name: str
    meaning: str
    values: list[tuple[int, float]]

    @property
    def constant(self) -> bool:
        """Whether it has one value only."""
        return len({value for _, value in self.values}) == 1

    @property
    def summary(self) -> list[str]:
        """First value, mean, last and largest, as the report shows them."""
        values = [value for _, value in self.values]
        return [number(value) for value in (values[0], sum(values) / len(values), values[-1], max(values))]

    @property
    def chart(self) -> str:
        """Its curve, as an SVG element."""
        return curve([], self.values, PART, label=f"{self.name} by iteration")


def signals(lines: Lines, *, clips: bool) -> list[Signal]:
    """Return the statistics that a run measured.

    Args:
        clips: whether its objective clips a ratio; else a ratio that is 0 throughout was not measured.
    """
    found = []
    for key, name, meaning in KNOWN:
        values = points(lines, "train", key)
        absent = key in COUNTS or (key in RATIO and not clips)
        if values and not (absent and not any(value for _, value in values)):
            found.append(Signal(name, meaning, values))
    return found


def by_step(lines: Lines) -> list[OfStep]:
    """What was measured of each step of the schedule, in their order."""
    found: dict[str, dict[int, list[float]]] = {"mean_abs_log_ratio": {}, "kl": {}}
    for line in lines:
        for key, value in line.items():
            match key.split("/"):
                case ["policy", ("mean_abs_log_ratio" | "kl") as name, step] if value is not None:
                    found[name].setdefault(int(step.removeprefix("step_")), []).append(value)
    kls = found["kl"]
    return [
        OfStep(step, statistics.mean(values), statistics.mean(kls[step]) if step in kls else None)
        for step, values in sorted(found["mean_abs_log_ratio"].items())
    ]
