"""Whether a run fits a GPU: the peak of each phase and part, the largest batches, and which switch to take first.

Everything here is arithmetic on what a call of one row allocates: what is there once, and what comes with each row.
"""

from __future__ import annotations

import functools
import json
import re
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flowgrpo.schema.lora import Lora
from flowgrpo.schema.sections import AUTO, RunConfig
from flowgrpo.training.distributed.gpu_layout import Layout, layout_of
from flowgrpo.training.model_files.hub_files import Shape
from flowgrpo.training.planning.allocation_counter import Peaks
from flowgrpo.training.weights import quantisation, sharding
from flowgrpo.training.weights.optimizers import MESSAGE, OPTIMIZERS
from rewards import BUILT_IN

GIB = 2**30
LIBRARIES = GIB  # beside what is counted: a GPU's context
FRAGMENTS = 0.05  # and a part of all that no allocation can use
GATHERED = 2.4  # blocks of a network in shards: the one that computes, and what is copied of the next
BLOCK = re.compile(r".*?\.\d+\.")  # the path of one, before the names of its tensors
ROLLOUT, UPDATE = "train.rollout_batch", "train.micro_batch"
MOST = 2**31  # rows, where nothing depends on them
RESORTS = (
    ("train.optimizer.name", "adamw8bit"),
    ("train.ema", None),
    ("model.dtype", "bfloat16"),
    ("model.lora", {"rank": 16}),
)
PARTS = ("weights", "trained", "optimizer", "gradients", "states", "samples", "activations")


@dataclass(frozen=True, kw_only=True)
class Phase:
    """The most that a phase has on the device.

    Attributes:
        rows: in one call.
        key: of the config that sets them; None where none does.
        fixed: bytes of each part for any number of rows: weights, trained (adapters or weights, their average and
            reference), optimizer, gradients, states, samples.
        calls: bytes of activations, by rows.
    """

    name: str
    rows: int
    key: str | None
    fixed: dict[str, int]
    calls: Peaks

    @property
    def parts(self) -> dict[str, int]:
        """Bytes of each part."""
        return self.fixed | {"activations": self.calls.of(self.rows)}

    @property
    def total(self) -> int:
        """Bytes with what libraries and fragments take."""
        return int(sum(self.parts.values()) * (1 + FRAGMENTS)) + LIBRARIES

    def largest(self, room: int) -> int:
        """The most rows of a call that fit into `room` bytes; 0 if one does not."""
        left = (room - LIBRARIES + 1) / (1 + FRAGMENTS) - sum(self.fixed.values())
        rows = min(int((left - fixed) / each) if each else (fixed <= left) * MOST for fixed, each in self.calls.points)
        while rows > 0 and replace(self, rows=rows).total > room:  # by rounding
            rows -= 1
        return max(min(rows, MOST), 0)


class Budget(ABC):
    """The memory of a run, with switches set or not.

    Attributes:
        config: of the run.
        of_node: processes of a machine.
    """

    config: RunConfig
    of_node: int

    @property
    def layout(self) -> Layout:
        """How its processes lie on machines."""
        return layout_of(self.config, self.of_node)

    def on_processes(self, processes: int, *, times: float = 1) -> Budget:
        """The same run on so many processes, with so many times the samples."""
        return self.switched("run.processes", processes)

    @abstractmethod
    def phases(self) -> list[Phase]:
        """The phases of an iteration, with the rows that the config asks for, and what comes before the first."""

    @abstractmethod
    def switches(self) -> list[tuple[str, Any]]:
        """The switches that can be set and are not, from the one that costs least."""

    def resorts(self) -> list[tuple[str, Any]]:
        """Settings that spare memory and change what is learned, from the one that changes least; after the switches."""
        model, train = self.config.model, self.config.train
        possible = {
            "train.optimizer.name": train.optimizer.name == "adamw",
            "train.ema": train.ema is not None,
            "model.dtype": model.dtype == "float32",
            "model.lora": model.lora is None,
        }
        return [(key, value) for key, value in RESORTS if possible[key]]

    @abstractmethod
    def switched(self, key: str, value: Any) -> Budget:
        """The same run with a setting made."""

    def kept_graphs(self, room: int) -> dict[str, Any]:
        """Rows whose graphs a rollout may keep for the first update, their bytes, and whether it does; none by default."""
        return {"rows": 0, "bytes": 0, "kept": False}

    def largest(self, room: int) -> dict[str, int]:
        """The most rows of each key that sets them that fit into `room` bytes; 0 where one is too many."""
        found: dict[str, list[int]] = {ROLLOUT: [], UPDATE: []}
        for phase in self.phases():
            for key in found if phase.key is None else (phase.key,):
                found[key].append(phase.largest(room) if phase.key else (phase.total <= room) * MOST)
        return {key: min(rows) for key, rows in found.items()}

    def peak(self, rows: dict[str, int] | None = None) -> int:
        """Bytes of the phase that takes the most, with other numbers of rows perhaps."""
        return max(phase.total for phase in at(self.phases(), rows or {}))

    def smallest(self) -> int:
        """Bytes with one row in each call."""
        return self.peak({ROLLOUT: 1, UPDATE: 1})


def settled(budget: Budget, room: int) -> tuple[Budget, dict[str, int]]:
    """A run with numbers in the place of rows that it finds when it starts, and these by their keys; as it is without.

    They are the most that it tries on so many processes and that fit into `room` bytes, and 1 where none do. A run may find
    that fewer are as fast.
    """
    train, found = budget.config.train, {}
    for name in train.found:
        key = f"train.{name}"
        shares = (ROLLOUT, UPDATE) if key == UPDATE and train.rollout_batch is None else (key,)
        largest = budget.largest(room)
        samples = train.groups * train.group_size // train.updates // budget.config.run.shares
        found[key] = 1 << max(1, min(samples, *(largest[share] for share in shares))).bit_length() - 1
    for key, rows in found.items():
        budget = budget.switched(key, rows)
    return budget, found


def rewards_of(config: RunConfig) -> tuple[int, list[str]]:
    """Bytes of the weights of a run's rewards, and the names of those whose weights are not known."""
    uses = [use.use for use in (*config.rewards, *config.eval_rewards)]
    known = {BUILT_IN[use].target: BUILT_IN[use].size for use in uses if use in BUILT_IN}
    return sum(known.values()), [use for use in uses if use not in BUILT_IN]


def at(phases: Sequence[Phase], rows: dict[str, int]) -> list[Phase]:
    """Phases with other numbers of rows, by the key that sets them."""
    return [phase if phase.key is None else replace(phase, rows=rows.get(phase.key, phase.rows)) for phase in phases]


def at_key(config: Any, key: str) -> Any:
    """What a config has at a key."""
    return functools.reduce(getattr, key.split("."), config)


def switched(config: Any, key: str, value: Any) -> Any:
    """A config, or a section of one, with a key set; a map stands for adapters with its numbers."""
    head, _, rest = key.partition(".")
    value = switched(getattr(config, head), rest, value) if rest else Lora(**value) if head == "lora" else value
    return config.model_copy(update={head: value})


def can_share(config: RunConfig) -> bool:
    """Whether several processes hold the networks whole, and could share them."""
    return config.run.processes > 1 and sharding.can(config)


def gathers(config: RunConfig, networks: Iterable[Mapping[str, Shape]], width: int, *, among: int) -> int:
    """Bytes that a call gathers of one network in shards, one of which is called at a time; 0 where all are whole.

    Args:
        networks: the shapes of their tensors, by name.
        width: bytes of a number of a frozen base; those that learn travel in float32 at the most.
        among: how many processes share them.
    """
    if among == 1:
        return 0
    form, width = config.model.quantise, width if config.model.lora else 4
    return max(gathered(tensors, lambda part: quantisation.size(part, width, form)) for tensors in networks)


def gathered(tensors: Mapping[str, Shape], size: Callable[[Mapping[str, Shape]], int]) -> int:
    """Bytes that a call of a network in shards gathers: what lies in no block, and `GATHERED` times its largest block.

    Args:
        tensors: shapes of the network's, by name.
        size: bytes of some of them.
    """
    blocks: dict[str, dict[str, Shape]] = defaultdict(dict)
    for name, shape in tensors.items():
        found = BLOCK.match(name)
        blocks[found[0] if found else ""][name] = shape
    outside = size(blocks.pop("", {}))
    return outside + round(GATHERED * max(map(size, blocks.values()), default=0))


def learnt(config: RunConfig, trained: int, *, copies: int, among: int) -> dict[str, int]:
    """Bytes of what is learned: the weights with their copies, the optimizer's moments, and gradients.

    Beside `copies` there are the average and the versions of `run.staleness`.

    Gradients are freed when the next update begins, so that they are there in all phases.

    Args:
        trained: how many numbers are trained.
        copies: of them that are other policies, as the reference of a divergence.
        among: how many processes share the networks.
    """
    trained = trained if config.model.lora else -(-trained // among)
    versions = config.run.staleness + 1 if config.run.staleness else 0
    copies += 1 + (config.train.ema is not None) + versions
    moments = OPTIMIZERS[config.train.optimizer.name].bytes_per_number
    return {"trained": 4 * copies * trained, "optimizer": round(moments * trained), "gradients": 4 * trained}


def step(config: RunConfig, trained: int, *, among: int) -> Peaks:
    """What an optimizer step allocates: where processes sum, a message of their gradients, twice.

    Gradients of shards are summed as they come.
    """
    sums = config.run.processes > 1 and not (config.model.lora is None and among > 1)
    return Peaks(((2 * min(4 * trained, MESSAGE) if sums else 0, 0),))


def advised(budget: Budget, room: int) -> tuple[dict[str, Any], Budget] | None:
    """Settings by which a run fits, of which none can be spared, from the cheapest, and the run with them; None if none do.

    Smaller batches come before switches, for they cost the least time; a switch is taken when one row does not fit, and
    what changes the learning when no switch helps any more.
    """
    settings: dict[str, Any] = {}
    after = budget
    while not _fits(after, room):
        taken = _next(after, room, after.switches()) or _next(after, room, after.resorts())
        if taken is None:
            return None
        settings[taken[0]] = taken[1]
        after = after.switched(*taken)
    for key in list(settings):
        fewer = {other: value for other, value in settings.items() if other != key}
        without = _made(budget, fewer)
        if _fits(without, room):
            settings, after = fewer, without
    most = after.largest(room)
    for phase in after.phases():
        if phase.key is not None and phase.rows > most[phase.key]:
            settings[phase.key] = most[phase.key]
    if UPDATE in settings and after.config.train.rollout_batch is None:  # which would follow it
        settings.setdefault(ROLLOUT, min(after.config.train.micro_batch, most[ROLLOUT]))
    return settings, after


def relief(budget: Budget, name: str, prefixes: tuple[str, ...] = ("",)) -> tuple[str, Any] | None:
    """The setting by which a phase takes the least: a switch, or half its rows; None if none of them helps.

    What changes the learning is looked at only where no switch helps. Of those that help alike the cheapest is taken.

    Args:
        name: of the phase.
        prefixes: of the keys to choose from.
    """
    now = _named(budget.phases(), name)
    if now is None:
        return None
    tried: list[tuple[int, tuple[str, Any]]] = []
    key, half = now.key, now.rows // 2
    if key is not None and at_key(budget.config, key) != AUTO and half and key.startswith(prefixes):
        tried.append((replace(now, rows=half).total, (key, half)))
    for options in (budget.switches(), budget.resorts()):
        own = [option for option in options if option[0].startswith(prefixes)]
        others = [(option, _named(budget.switched(*option).phases(), name)) for option in own]
        tried += [(other.total, option) for option, other in others if other is not None]
        total, best = min(tried, key=lambda each: each[0], default=(now.total, None))
        if total < now.total:
            return best
    return None


def _named(phases: Sequence[Phase], name: str) -> Phase | None:
    return next((phase for phase in phases if phase.name == name), None)


def _fits(budget: Budget, room: int) -> bool:
    """Whether calls of one row do."""
    return all(budget.largest(room).values())


def _next(budget: Budget, room: int, options: Sequence[tuple[str, Any]]) -> tuple[str, Any] | None:
    """The first setting that makes a run fit, else the first that helps; None if none does."""
    others = [(option, budget.switched(*option)) for option in options]
    helpful = [(option, other) for option, other in others if other.smallest() < budget.smallest()]
    if not helpful:
        return None
    return next((option for option, other in helpful if _fits(other, room)), helpful[0][0])


def _made(budget: Budget, settings: dict[str, Any]) -> Budget:
    for key, value in settings.items():
        budget = budget.switched(key, value)
    return budget


def fitted(budget: Budget, room: int, not_counted: Sequence[str]) -> dict[str, Any]:
    """What `flowgrpo plan --gpu-memory` says, as JSON has it; sizes are bytes.

    Args:
        room: of one GPU; each process has one.
        not_counted: names of rewards whose weights are not known.
    """
    budget, rows = settled(budget, room)
    found = advised(budget, room)
    settings, after = found or ({}, budget)
    return {
        "gpu_bytes": room,
        "found": rows,
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
        "graphs": budget.kept_graphs(room),
    }


def _as_json(phase: Phase) -> dict[str, Any]:
    return {"phase": phase.name, "rows": phase.rows, **phase.parts, "total": phase.total}


def lines(found: dict[str, Any]) -> Iterator[str]:
    """The same for the terminal."""
    room = found["gpu_bytes"]
    yield f"{'phase':10}{'rows':>6}" + "".join(f"{name:>12}" for name in (*PARTS, "at least"))
    for phase in found["phases"]:
        sizes = (_gib(phase[name]) if name in phase else "" for name in (*PARTS, "total"))
        yield f"{phase['phase']:10}{phase['rows']:>6}" + "".join(f"{size:>12}" for size in sizes)
    yield f"in GiB; at least: with {LIBRARIES / GIB:.0f} GiB and {FRAGMENTS:.0%} more, for libraries and fragments"
    if found["found"]:
        yield f"found when the run starts, and counted with the most that fits: {written(found['found'])}"
    if found["rewards_not_counted"]:
        yield f"not counted: the weights of {', '.join(found['rewards_not_counted'])}"
    yield "samples: decoded ones that wait for their rewards; what rewards allocate while they run is not counted"
    if found["fits"]:
        phase = max(found["phases"], key=lambda phase: phase["total"])["phase"]
        yield f"fits {_gib(room)} GiB: at most {_gib(found['peak'])}, in the phase {phase}; {_most(found['largest'])}"
    elif found["set"] is None:
        yield f"does not fit {_gib(room)} GiB, whatever is set of all that is tried: take a larger GPU, or smaller samples"
    else:
        after = _gib(found["peak_when_set"])
        yield f"does not fit {_gib(room)} GiB as it is; it does, with {after}, by: {written(found['set'])}"
    if (graphs := found["graphs"])["rows"]:
        does, size = "keeps" if graphs["kept"] else "does not keep", _gib(graphs["bytes"])
        yield f"train.replay: the rollout {does} graphs for the first update, {size} of {graphs['rows']:,} rows"
    for switch in found["switches"]:
        yield f"with {written(switch['set'])}: {_gib(switch['peak'])}; {_most(switch['largest'])}"


def _most(largest: dict[str, int]) -> str:
    return ", ".join(f"{key} up to {rows}" for key, rows in largest.items())


def written(settings: dict[str, Any]) -> str:
    """Settings as overrides of a command."""
    return " ".join(
        f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in settings.items()
    )


def _gib(size: float) -> str:
    return f"{size / GIB:.1f}"
