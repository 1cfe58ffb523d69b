"""Statistics of groups and of the policy by iteration."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from flowgrpo.commands.page_parts.curve import PART, curve
from flowgrpo.commands.page_parts.history import Metrics, points
from flowgrpo.commands.page_parts.numbers import number

# Key in the metric lines, name, and meaning.
KNOWN = (
    ("groups/zero_std_fraction", "zero-variance groups", "share of groups whose rewards are all alike"),
    ("groups/left_out_fraction", "left out", "share of units that the selection left out"),
    ("policy/loss", "loss", "of the objective over final samples, without divergences"),
    ("policy/clip_fraction", "clip fraction", "share of trained steps that the objective stopped"),
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
RATIO = ("policy/clip_fraction", "policy/mean_abs_log_ratio")  # prefixes; always 0 if the objective has no ratio
COUNTS = ("reward/lost", "policy/skipped_updates")  # shown only if there are any


@dataclass(frozen=True)
class OfStep:
    """A step of the schedule, counted from 1, with means over the iterations that trained on it."""

    step: int
    log_ratio: float
    kl: float | None


@dataclass(frozen=True)
class Signal:
    """A statistic by iteration; `values` holds at least one pair of an iteration and a value."""

    name: str
    meaning: str
    values: list[tuple[int, float]]

    @property
    def constant(self) -> bool:
        """Whether all values are equal."""
        return len({value for _, value in self.values}) == 1

    @property
    def summary(self) -> list[str]:
        """First value, mean, last and largest value, formatted."""
        values = [value for _, value in self.values]
        return [number(value) for value in (values[0], sum(values) / len(values), values[-1], max(values))]

    @property
    def chart(self) -> str:
        """The curve, as an SVG element."""
        return curve([], self.values, PART, label=f"{self.name} by iteration")


def signals(metrics: Metrics, *, clips: bool) -> list[Signal]:
    """Return the measured statistics; leave out all-zero counts, and all-zero ratios if the objective clips no ratio."""
    measured = []
    for key, name, meaning in KNOWN:
        values = points(metrics, "train", key)
        absent = key in COUNTS or (key.startswith(RATIO) and not clips)
        if values and not (absent and not any(value for _, value in values)):
            measured.append(Signal(name, meaning, values))
    return measured


def by_step(metrics: Metrics) -> list[OfStep]:
    """Return the mean log-ratio and KL of each step of the schedule that has a log-ratio."""
    values: dict[str, dict[int, list[float]]] = {"mean_abs_log_ratio": {}, "kl": {}}
    for line in metrics:
        for key, value in line.items():
            match key.split("/"):
                case ["policy", ("mean_abs_log_ratio" | "kl") as name, step] if value is not None:
                    values[name].setdefault(int(step.removeprefix("step_")), []).append(value)
    kls = values["kl"]
    return [
        OfStep(step, statistics.mean(ratios), statistics.mean(kls[step]) if step in kls else None)
        for step, ratios in sorted(values["mean_abs_log_ratio"].items())
    ]
