"""What a run cost: seconds, model evaluations and samples by phase, and the most memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

from flowgrpo.training.reports.progress import duration

Lines = Sequence[Mapping[str, Any]]

# The phases: in which lines, and under which keys, their seconds, model evaluations and decoded samples stand.
PHASES = (
    ("calibration", "calibration", "time/calibration", "cost/model_evaluations", "cost/decoded"),
    ("rollout", "train", "time/rollout", "cost/rollout_evaluations", "cost/decoded"),
    ("update", "train", "time/update", "cost/update_evaluations", None),
    ("evaluation", "eval", "time/eval", "cost/model_evaluations", "cost/decoded"),
)


@dataclass(frozen=True)
class Phase:
    """What one phase took in all iterations.

    Attributes:
        share: of the seconds of all phases, in percent.
        evaluations: of the model.
        decoded: samples.
    """

    name: str
    seconds: float
    share: int
    _: KW_ONLY
    evaluations: int
    decoded: int

    @property
    def time(self) -> str:
        """Its seconds as a clock shows them."""
        return duration(self.seconds)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a run cost.

    Attributes:
        phases: those that the run had.
        total: of them.
        rewards: seconds in rewards, which are among those of the rollout.
        per_iteration: mean seconds of a rollout and an update; None without an iteration.
        peak: most bytes of memory on one process; None where it is unknown.
    """

    phases: list[Phase]
    total: Phase
    rewards: float
    per_iteration: float | None
    peak: int | None

    @property
    def sentence(self) -> str:
        """What the table does not say."""
        said = []
        if self.per_iteration is not None:
            said.append(f"An iteration took {self.per_iteration:.1f} s on average.")
        if self.rewards >= 0.1:
            said.append(f"Rewards took {self.rewards:.1f} s, within the rollout.")
        if self.peak is not None:
            said.append(f"The most memory on one process was {self.peak / 2**30:.2f} GiB.")
        return " ".join(said)


def cost(lines: Lines) -> Cost | None:
    """Return what the iterations and evaluations of some metric lines cost; None without any."""
    sums: list[tuple[str, float, int, int]] = []
    for name, phase, seconds_key, evaluations_key, decoded_key in PHASES:
        own = [line for line in lines if line["phase"] == phase]
        if own:
            sums.append((name, _sum(own, seconds_key), _sum(own, evaluations_key), _sum(own, decoded_key)))
    if not sums:
        return None
    seconds = sum(each[1] for each in sums)
    train = [line for line in lines if line["phase"] == "train"]
    spent = [line.get("time/rollout", 0) + line.get("time/update", 0) for line in train]
    return Cost(
        phases=[
            Phase(name, s, round(100 * s / (seconds or 1)), evaluations=n, decoded=decoded)
            for name, s, n, decoded in sums
        ],
        total=Phase(
            "total", seconds, 100, evaluations=sum(each[2] for each in sums), decoded=sum(each[3] for each in sums)
        ),
        rewards=_sum(train, "time/reward"),
        per_iteration=sum(spent) / len(train) if train else None,
        peak=max((line["memory/peak_bytes"] for line in train if line.get("memory/peak_bytes")), default=None),
    )


def _sum(lines: Lines, key: str | None) -> Any:
    """The sum of a number of some lines, of which one may lack it; 0 without a key."""
    return 0 if key is None else sum(line.get(key) or 0 for line in lines)
