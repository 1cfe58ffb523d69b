"""Cost of a run: seconds, model evaluations and samples by phase, and peak memory."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any

from flowgrpo.commands.page_parts.history import Metrics, of_phase
from flowgrpo.training.reports.progress import duration

# Name, phase of the metric lines, and their keys of seconds, model evaluations and decoded samples.
PHASES = (
    ("calibration", "calibration", "time/calibration", "cost/model_evaluations", "cost/decoded"),
    ("rollout", "train", "time/rollout", "cost/rollout_evaluations", "cost/decoded"),
    ("update", "train", "time/update", "cost/update_evaluations", None),
    ("evaluation", "eval", "time/eval", "cost/model_evaluations", "cost/decoded"),
)


@dataclass(frozen=True)
class Phase:
    """Cost of one phase in all iterations; `share` is of the seconds of all phases, in percent."""

    name: str
    seconds: float
    share: int
    _: KW_ONLY
    evaluations: int
    decoded: int

    @property
    def time(self) -> str:
        """The seconds as hours, minutes and seconds."""
        return duration(self.seconds)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Cost of a run: `rewards` (part of the rollout) and `per_iteration` in seconds, `peak` in bytes on one process.

    `backward` is the number of model evaluations with a backward pass; 0 if the run did not count them.
    """

    phases: list[Phase]
    total: Phase
    rewards: float
    per_iteration: float | None
    peak: int | None
    backward: int

    @property
    def sentence(self) -> str:
        """Sentences beside the table."""
        sentences = []
        if self.per_iteration is not None:
            sentences.append(f"An iteration took {self.per_iteration:.1f} s on average.")
        if self.rewards >= 0.1:
            sentences.append(f"Rewards took {self.rewards:.1f} s, within the rollout.")
        if self.backward:
            sentences.append(f"{self.backward:,} model evaluations had a backward pass.")
        if self.peak is not None:
            sentences.append(f"The most memory on one process was {self.peak / 2**30:.2f} GiB.")
        return " ".join(sentences)


def cost(metrics: Metrics) -> Cost | None:
    """Return the cost of the iterations and evaluations in metric lines; None if there are none."""
    sums = {
        name: [_sum(lines, key) for key in keys] for name, phase, *keys in PHASES if (lines := of_phase(metrics, phase))
    }
    if not sums:
        return None
    seconds, evaluations, decoded = map(sum, zip(*sums.values(), strict=True))
    train = of_phase(metrics, "train")
    spent = [line.get("time/rollout", 0) + line.get("time/update", 0) for line in train]
    return Cost(
        phases=[
            Phase(name, time, round(100 * time / (seconds or 1)), evaluations=evaluations, decoded=decoded)
            for name, (time, evaluations, decoded) in sums.items()
        ],
        total=Phase("total", seconds, 100, evaluations=evaluations, decoded=decoded),
        rewards=_sum(train, "time/reward"),
        per_iteration=sum(spent) / len(train) if train else None,
        peak=max((line["memory/peak_bytes"] for line in train if line.get("memory/peak_bytes")), default=None),
        backward=_sum(train, "cost/backward_evaluations"),
    )


def _sum(metrics: Metrics, key: str | None) -> Any:
    return 0 if key is None else sum(line.get(key) or 0 for line in metrics)
