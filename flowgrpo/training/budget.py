"""Whether a run fits a GPU: the peak of each phase and part, the largest batches, and which switch to take first.

Everything here is arithmetic on what one row of a call allocates; calls of several rows allocate as many times as much.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flowgrpo.schema.sections import RunConfig
from rewards import BUILT_IN

GIB = 2**30
LIBRARIES, FRAGMENTS = (
    GIB,
    0.05,
)  # beside what is counted: a GPU's context, and a part of all that no allocation can use
ROLLOUT, UPDATE = "train.rollout_batch", "train.micro_batch"
PARTS = ("weights", "trained", "optimizer", "gradients", "states", "activations")


@dataclass(frozen=True, kw_only=True)
class Phase:
    """The most that a phase has on the device.

    Attributes:
        rows: in one call.
        key: of the config that sets them; None where there is one row.
        fixed: bytes of each part for any number of rows: weights, trained (adapters or weights, their average and
            reference), optimizer, gradients, states, activations.
        each: bytes of activations for each row.
    """

    name: str
    rows: int
    key: str | None
    fixed: dict[str, int]
    each: int

    @property
    def parts(self) -> dict[str, int]:
        """Bytes of each part."""
        return self.fixed | {"activations": self.fixed.get("activations", 0) + self.rows * self.each}

    @property
    def total(self) -> int:
        """Bytes with what libraries and fragments take."""
        return int(sum(self.parts.values()) * (1 + FRAGMENTS)) + LIBRARIES

    def largest(self, room: int) -> int:
        """The most rows of a call that fit into `room` bytes; 0 if one does not."""
        one = replace(self, rows=1).total
        return 0 if one > room else 1 + int((room - one) / ((1 + FRAGMENTS) * max(self.each, 1)))


class Budget(ABC):
    """The memory of a run, with switches set or not.

    Attributes:
        config: of the run.
    """

    config: RunConfig

    @abstractmethod
    def phases(self) -> list[Phase]:
        """The phases of an iteration, with the rows that the config asks for, and what comes before the first."""

    @abstractmethod
    def switches(self) -> list[tuple[str, Any]]:
        """The switches that can be set and are not, from the one that costs least."""

    @abstractmethod
    def switched(self, key: str, value: Any) -> Budget:
        """The same run with a switch set."""

    def largest(self, room: int) -> dict[str, int]:
        """The most rows of each key that sets them that fit into `room` bytes; 0 where one is too many."""
        found = {ROLLOUT: [], UPDATE: []}
        for phase in self.phases():
            for key in found if phase.key is None else (phase.key,):
                found[key].append(phase.largest(room) if phase.key else (phase.total <= room) * 2**31)
        return {key: min(rows) for key, rows in found.items()}

    def peak(self, rows: dict[str, int] | None = None) -> int:
        """Bytes of the phase that takes the most, with other numbers of rows perhaps."""
        return max(phase.total for phase in at(self.phases(), rows or {}))

    def smallest(self) -> int:
        """Bytes with one row in each call."""
        return self.peak({ROLLOUT: 1, UPDATE: 1})


def rewards_of(config: RunConfig) -> tuple[int, list[str]]:
    """Bytes of the weights of a run's rewards, and the names of those whose weights are not known."""
    uses = [use.use for use in (*config.rewards, *config.eval_rewards)]
    known = {BUILT_IN[use].target: BUILT_IN[use].size for use in uses if use in BUILT_IN}
    return sum(known.values()), [use for use in uses if use not in BUILT_IN]


def at(phases: Sequence[Phase], rows: dict[str, int]) -> list[Phase]:
    """Phases with other numbers of rows, by the key that sets them."""
    return [replace(phase, rows=rows.get(phase.key, phase.rows)) for phase in phases]


def switched(config: RunConfig, key: str, value: Any) -> RunConfig:
    """A config with a key of its model set."""
    return config.model_copy(update={"model": config.model.model_copy(update={key.removeprefix("model."): value})})


def advised(budget: Budget, room: int) -> tuple[dict[str, Any], Budget] | None:
    """The fewest settings by which a run fits, from the cheapest, and the run with them; None if none do.

    Smaller batches come before switches, for they cost the least time; a switch is taken when one row does not fit.
    """
    settings: dict[str, Any] = {}
    while not all(budget.largest(room).values()):
        options = [(key, value, budget.switched(key, value)) for key, value in budget.switches()]
        helpful = [option for option in options if option[2].smallest() < budget.smallest()]
        if not helpful:
            return None
        key, value, budget = next((o for o in helpful if all(o[2].largest(room).values())), helpful[0])
        settings[key] = value
    most = budget.largest(room)
    for phase in budget.phases():
        if phase.key is not None and phase.rows > most[phase.key]:
            settings[phase.key] = most[phase.key]
    if UPDATE in settings and budget.config.train.rollout_batch is None:  # which would follow it
        settings.setdefault(ROLLOUT, min(budget.config.train.micro_batch, most[ROLLOUT]))
    return settings, budget


def fitted(budget: Budget, room: int, not_counted: Sequence[str]) -> dict[str, Any]:
    """What `flowgrpo plan --gpu-memory` says, as JSON has it; sizes are bytes.

    Args:
        room: of one GPU; each process has one, and holds the whole model.
        not_counted: names of rewards whose weights are not known.
    """
    found = advised(budget, room)
    settings, after = found or ({}, budget)
    return {
        "gpu_bytes": room,
        "fits": budget.peak() <= room,
        "set": settings if found else None,
        "phases": [_as_json(phase) for phase in budget.phases()],
        "peak": budget.peak(),
        "peak_when_set": after.peak(settings) if found else None,
        "largest": budget.largest(room),
        "switches": [
            {"set": {key: value}, "peak": other.peak(), "largest": other.largest(room)}
            for key, value, other in ((*switch, budget.switched(*switch)) for switch in budget.switches())
        ],
        "rewards_not_counted": list(not_counted),
    }


def _as_json(phase: Phase) -> dict[str, Any]:
    return {"phase": phase.name, "rows": phase.rows, **phase.parts, "total": phase.total}


def lines(found: dict[str, Any]) -> Iterator[str]:
    """The same for the terminal."""
    room = found["gpu_bytes"]
    yield f"{'phase':10}{'rows':>6}" + "".join(f"{name:>13}" for name in (*PARTS, "at least"))
    for phase in found["phases"]:
        sizes = (_gib(phase[name]) if name in phase else "" for name in (*PARTS, "total"))
        yield f"{phase['phase']:10}{phase['rows']:>6}" + "".join(f"{size:>13}" for size in sizes)
    yield f"in GiB; at least: with {LIBRARIES / GIB:.0f} GiB and {FRAGMENTS:.0%} more, for libraries and fragments"
    if found["rewards_not_counted"]:
        yield f"not counted: the weights of {', '.join(found['rewards_not_counted'])}"
    if found["fits"]:
        phase = max(found["phases"], key=lambda phase: phase["total"])["phase"]
        yield f"fits {_gib(room)} GiB: at most {_gib(found['peak'])}, in the phase {phase}; {_most(found['largest'])}"
    elif found["set"] is None:
        yield f"does not fit {_gib(room)} GiB, whatever is set: take a larger GPU, or smaller samples"
    else:
        after = _gib(found["peak_when_set"])
        yield f"does not fit {_gib(room)} GiB as it is; it does, with {after}, by: {_written(found['set'])}"
    for switch in found["switches"]:
        yield f"with {_written(switch['set'])}: {_gib(switch['peak'])}; {_most(switch['largest'])}"


def _most(largest: dict[str, int]) -> str:
    return ", ".join(f"{key} up to {rows}" for key, rows in largest.items())


def _written(settings: dict[str, Any]) -> str:
    return " ".join(f"{key}={str(value).lower()}" for key, value in settings.items())


def _gib(size: float) -> str:
    return f"{size / GIB:.1f}"
