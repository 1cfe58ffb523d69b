"""Check whether a run fits a GPU, and settings that make it fit (`flowgrpo plan --gpu-memory`)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from flowgrpo.schema.readable import counted
from flowgrpo.schema.sections import AUTO
from flowgrpo.training.planning.memory_phases import (
    FRAGMENTS,
    GIB,
    LIBRARIES,
    ROLLOUT,
    UPDATE,
    Budget,
    Phase,
    at,
    at_key,
    with_setting,
)
from flowgrpo.training.planning.reward_memory import uncounted_rewards

__all__ = [
    "GIB",
    "ROLLOUT",
    "UPDATE",
    "Budget",
    "advise",
    "as_overrides",
    "at",
    "best_relief",
    "check_fit",
    "lines",
    "resolve_batches",
    "with_setting",
]

PARTS = ("weights", "rewards", "trained", "optimizer", "gradients", "states", "samples", "activations")
Setting = tuple[str, Any]


def resolve_batches(budget: Budget, room: int) -> tuple[Budget, dict[str, int]]:
    """Replace the batch sizes that are `auto`; return the changed budget, and the new batch sizes by config key.

    Each new batch size is the largest power of two that fits into `room` bytes and is at most the number of a process's
    samples in an optimizer step, but at least 1. The run itself may choose a smaller one.
    """
    train, sizes = budget.config.train, {}
    largest = budget.largest(room)
    for name in train.found:
        key = f"train.{name}"
        shares = (ROLLOUT, UPDATE) if key == UPDATE and train.rollout_batch is None else (key,)
        samples = train.groups * train.group_size // train.updates // budget.config.run.shards
        sizes[key] = 1 << max(1, min(samples, *(largest[share] for share in shares))).bit_length() - 1
    return budget.with_settings(sizes), sizes


def advise(budget: Budget, room: int) -> tuple[dict[str, Any], Budget]:
    """Return a minimal set of settings that make a run fit into `room` bytes, and the changed budget.

    Smaller batches come first, since they cost the least time. Then come memory-saving settings (`Budget.switches`), then
    settings that change the training (`Budget.resorts`). If they are not enough, all that help are returned.
    """
    settings: dict[str, Any] = {}
    after = budget
    while not after.fits(room):
        setting = _find_helpful(after, room, after.switches()) or _find_helpful(after, room, after.resorts())
        if setting is None:
            return settings, after
        key, value = setting
        settings[key], after = value, after.with_setting(key, value)
    for key in list(settings):
        fewer = {other: value for other, value in settings.items() if other != key}
        without = budget.with_settings(fewer)
        if without.fits(room):
            settings, after = fewer, without
    batches = _smaller_batches(after, room)
    return settings | batches, after.with_settings(batches)


def _smaller_batches(budget: Budget, room: int) -> dict[str, int]:
    """Return the batch sizes, by config key, that must be smaller to fit; equal sizes stay equal, so they round alike."""
    most, train = budget.largest(room), budget.config.train
    if train.rollout_rows == train.update_rows:
        most = dict.fromkeys(most, min(most.values()))
    sizes = {phase.key: most[phase.key] for phase in budget.phases() if phase.key and phase.rows > most[phase.key]}
    if train.rollout_batch is None:  # then `micro_batch` sets both
        sizes.pop(ROLLOUT, None)
    return sizes


def best_relief(budget: Budget, name: str, prefixes: tuple[str, ...] = ("",)) -> Setting | None:
    """Return the setting that saves the most memory in phase `name`; None if none saves anything.

    Only settings whose key has one of the `prefixes` are tried. Settings that change the training are tried only if
    nothing else helps. If several settings save equally much, the cheapest is returned.
    """
    now = _phase(budget, name)
    if now is None:
        return None
    sizes: list[tuple[int, Setting]] = []
    key, half = now.key, now.rows // 2
    if key == ROLLOUT and budget.config.train.rollout_batch is None:
        key = UPDATE
    if key is not None and at_key(budget.config, key) != AUTO and half and key.startswith(prefixes):
        sizes.append((replace(now, rows=half).total, (key, half)))
    for options in (budget.switches(), budget.resorts()):
        phases = [
            (option, _phase(budget.with_setting(*option), name)) for option in options if option[0].startswith(prefixes)
        ]
        sizes += [(phase.total, option) for option, phase in phases if phase is not None]
        total, best = min(sizes, key=lambda each: each[0], default=(now.total, None))
        if total < now.total:
            return best
    return None


def _phase(budget: Budget, name: str) -> Phase | None:
    return next((phase for phase in budget.phases() if phase.name == name), None)


def _find_helpful(budget: Budget, room: int, options: Sequence[Setting]) -> Setting | None:
    """Return the first setting that makes a run fit, or else the first that saves memory; None if none does."""
    others = [(option, budget.with_setting(*option)) for option in options]
    helpful = [(option, other) for option, other in others if other.smallest() < budget.smallest()]
    fitting = [option for option, other in helpful if other.fits(room)]
    return next(iter([*fitting, *(option for option, _ in helpful)]), None)


def check_fit(budget: Budget, room: int) -> dict[str, Any]:
    """Return as JSON values whether a run fits GPUs of `room` bytes, and settings that make it fit."""
    budget, rows = resolve_batches(budget, room)
    settings, after = advise(budget, room)
    can_fit = after.fits(room)
    least = max(at(after.phases(), {ROLLOUT: 1, UPDATE: 1}), key=lambda phase: phase.total)
    return {
        "gpu_bytes": room,
        "found": rows,
        "fits": budget.peak() <= room,
        "set": settings if can_fit else None,
        "least": None if can_fit else {"set": settings, "phase": least.name, "total": least.total},
        "phases": [
            {"phase": phase.name, "rows": phase.rows, **phase.parts, "total": phase.total} for phase in budget.phases()
        ],
        "peak": budget.peak(),
        "peak_when_set": after.peak() if can_fit else None,
        "largest": budget.largest(room),
        "switches": [
            {"set": {key: value}, "peak": other.peak(), "largest": other.largest(room)}
            for key, value, other in ((*switch, budget.with_setting(*switch)) for switch in budget.switches())
        ],
        "rewards_not_counted": uncounted_rewards(budget.config),
        "graphs": budget.kept_graphs(room),
        "loading_bytes": budget.loading_bytes(),
        "embeddings": budget.embeddings(),
    }


def lines(found: dict[str, Any]) -> Iterator[str]:
    """Format the result of `check_fit` for the terminal; yield its lines."""
    room = found["gpu_bytes"]
    yield f"{'phase':10}{'rows':>6}" + "".join(f"{name:>12}" for name in (*PARTS, "at least"))
    for phase in found["phases"]:
        sizes = (_gib(phase[name]) if name in phase else "" for name in (*PARTS, "total"))
        yield f"{phase['phase']:10}{phase['rows']:>6}" + "".join(f"{size:>12}" for size in sizes)
    yield f"sizes in GiB; 'at least' adds {FRAGMENTS:.0%} for fragments and {LIBRARIES / GIB:.0f} GiB for libraries"
    if found["found"]:
        yield f"found when the run starts; counted here with the most that fits: {as_overrides(found['found'])}"
    if found["rewards_not_counted"]:
        names = ", ".join(found["rewards_not_counted"])
        yield f"not counted: the weights that {names} may load; a function without a model loads none"
    yield "samples: decoded samples that wait for rewards; not counted: memory that rewards allocate while they run"
    if found["fits"]:
        phase = max(found["phases"], key=lambda phase: phase["total"])["phase"]
        yield f"fits {_gib(room)} GiB: the peak is {_gib(found['peak'])}, in the phase {phase}; {_largest(found['largest'])}"
    elif found["set"] is None:
        yield _too_large_line(room, **found["least"])
    else:
        after = _gib(found["peak_when_set"])
        yield f"does not fit {_gib(room)} GiB; it fits, with a peak of {after}, if you set {as_overrides(found['set'])}"
    yield _host_line(found["loading_bytes"], **found["embeddings"])
    if found["graphs"]["rows"]:
        yield _graphs_line(**found["graphs"])
    for switch in found["switches"]:
        if _outcome(switch) != _outcome(found):
            yield f"with {as_overrides(switch['set'])}: {_outcome(switch)}"


def _too_large_line(room: int, set: dict[str, Any], phase: str, total: int) -> str:
    """Format what a run takes at least, where no settings make it fit."""
    with_set = f"with {as_overrides(set)}, " if set else ""
    smaller = "" if phase == "encode" else ", or smaller samples"
    return (
        f"does not fit {_gib(room)} GiB with any setting that was tried: {with_set}the phase {phase} takes {_gib(total)} at "
        f"least; take a larger GPU{smaller}"
    )


def _host_line(loading: int, prompts: int, bytes: int) -> str:
    """Format the host memory of a process: weights while the model loads, and the embeddings that stay."""
    weights = f"{_gib(loading)} GiB of weights while the model loads"
    if not prompts:
        return f"host memory of each process: {weights}"
    embeddings = f"at most {_gib(bytes)} GiB of embeddings of {counted(prompts, 'prompt')}"
    return f"host memory of each process: {weights}, and {embeddings}"


def _graphs_line(rows: int, bytes: int, kept_rows: int, kept_bytes: int) -> str:
    """Format which graphs a rollout keeps for the first update, and what it costs that it keeps no more."""
    kept = f"the graphs of {counted(kept_rows, 'row')} ({_gib(kept_bytes)} GiB)" if kept_rows else "no graphs"
    if kept_rows == rows:
        return f"train.replay: the rollout keeps {kept} for the first update"
    return (
        f"train.replay: the rollout keeps {kept}, so the first update computes {counted(rows - kept_rows, 'row')} "
        f"again, which costs time and changes no result; all graphs would take {_gib(bytes)} GiB"
    )


def _outcome(found: dict[str, Any]) -> str:
    """Format the peak with a switch, or without one, and the largest batches that then fit."""
    largest = found["largest"]
    return f"a peak of {_gib(found['peak'])}; {_largest(largest) if all(largest.values()) else 'not enough alone'}"


def _largest(largest: dict[str, int]) -> str:
    return ", ".join(f"{key} up to {rows}" for key, rows in largest.items())


def as_overrides(settings: dict[str, Any]) -> str:
    """Format settings as `key=value` overrides on a command line."""
    return " ".join(
        f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in settings.items()
    )


def _gib(size: float) -> str:
    return f"{size / GIB:.1f}"
