"""Time and memory of an iteration on one to many GPUs, and settings that save time (`flowgrpo plan --gpus N`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from flowgrpo.errors import InputError
from flowgrpo.schema.readable import counted
from flowgrpo.schema.sections import RunConfig
from flowgrpo.training.distributed.minibatches import MOST_SAMPLES, check_geometry
from flowgrpo.training.planning.collective_traffic import build_messages
from flowgrpo.training.planning.gpu_types import GPUS, Gpu
from flowgrpo.training.planning.iteration_cost import PARTS, UTILISATION, Cost, Work, cost_of
from flowgrpo.training.planning.memory_budget import (
    GIB,
    ROLLOUT,
    UPDATE,
    Budget,
    as_overrides,
    resolve_batches,
    with_setting,
)

NODES = (1, 8, 64)  # numbers of machines that the table lists
ENOUGH = 0.7  # efficiency that a suggested batch must reach
SHOWN = 0.02  # fraction of the time that a setting must save to be listed


@dataclass(frozen=True, kw_only=True)
class Prices:
    """The conversion of work to seconds, for one type of GPU."""

    gpu_type: str  # key of `GPUS`
    fixed: float  # seconds of an iteration that GPUs do not speed up

    @property
    def gpu(self) -> Gpu:
        """The GPU's data-sheet numbers."""
        return GPUS[self.gpu_type]

    def cost(self, budget: Budget, work: Work) -> Cost:
        """Return the cost of an iteration on the run's processes."""
        config, layout = budget.config, budget.layout
        sent = build_messages(config, work.networks, width=work.width, trained=work.trained, layout=layout)
        rate = UTILISATION * self.gpu.peak(config.model.dtype)
        return cost_of(work, layout, self.gpu, sent, rate=rate, fixed=self.fixed)


def check_machines(config: RunConfig, of_node: int) -> None:
    """Raise InputError for runs whose time cannot be estimated.

    These have context parallelism, processes that do not train, or hsdp on machines with unequal numbers of processes.
    """
    processes = config.run.processes
    if config.run.context_parallel > 1:
        raise InputError("--gpus: the seconds of calls that processes share are not known, set run.context_parallel=1")
    for key, what in (("generators", "rollouts ahead"), ("evaluators", "evaluations beside the training")):
        if getattr(config.run, key):
            raise InputError(f"--gpus: the seconds of {what} are not known, set run.{key}=0")
    if config.run.sharding == "hsdp" and processes > of_node and processes % of_node:
        below = processes // of_node * of_node
        raise InputError(
            f"--gpus: hsdp needs as many on every machine, and {processes} are not {of_node} on each, take {below} or "
            f"{below + of_node}"
        )


def price_run(budget: Budget, work_of: Callable[[Budget], Work], prices: Prices) -> dict[str, Any]:
    """Return the costs of a run as JSON values, in seconds and bytes; `work_of` returns the work of an iteration."""
    room = int(prices.gpu.memory * GIB)
    budget, batch_sizes = resolve_batches(budget, room)
    work, of_node = work_of(budget), budget.of_node
    numbers = sorted({1, *(of_node * nodes for nodes in NODES), budget.layout.processes})
    return {
        "gpu_type": prices.gpu_type,
        "found": batch_sizes,
        "gpu_bytes": room,
        "utilisation": UTILISATION,
        "costs": [_as_json(budget.on_processes(count), work, prices) for count in numbers],
        "asked": budget.layout.processes,
        "limit": _limit(prices.cost(budget, work)),
        "refused": _refusal(budget.config),
        "idle": max(0, budget.layout.processes - work.trees),
        "changes": [each for each in _changes(budget, work_of, prices) if not batch_sizes.keys() & each["set"].keys()],
    }


def _as_json(budget: Budget, work: Work, prices: Prices) -> dict[str, Any]:
    cost, alone = prices.cost(budget, work), prices.cost(budget.on_processes(1), work)
    return {
        "gpus": cost.layout.processes,
        "machines": cost.layout.nodes,
        "samples": cost.samples,
        "seconds": cost.seconds,
        "total": cost.total,
        "efficiency": alone.total / (budget.layout.processes * cost.total),
        "peak": budget.peak(),
        "sent": cost.sent,
    }


def _changes(budget: Budget, work_of: Callable[[Budget], Work], prices: Prices) -> Iterator[dict[str, Any]]:
    """Yield settings that save time on the requested number of GPUs, each with its cost."""
    config, layout, work = budget.config, budget.layout, work_of(budget)
    before = prices.cost(budget, work)
    settings: list[dict[str, Any]] = []
    if config.run.sharding == "fsdp2" and layout.nodes > 1 and not layout.processes % layout.of_node:
        settings.append({"run.sharding": "hsdp"})
    rows = {ROLLOUT: config.train.rollout_rows, UPDATE: config.train.update_rows}
    if more := {key: 2 * count for key, count in rows.items() if count < before.samples}:
        settings.append(more)
    if config.model.gradient_checkpointing:
        settings.append({"model.gradient_checkpointing": False})
    alone = config.run.sharding == "none" and config.run.context_parallel == 1
    if config.kind == "flow" and alone and config.model.lora is not None:
        settings.append({"model.cuda_graphs": True})
    for setting in settings:
        after = budget.with_settings(setting)
        cost = _as_json(after, work_of(after), prices)
        fits = cost["peak"] <= prices.gpu.memory * GIB or "model.gradient_checkpointing" in setting  # not measured
        if cost["total"] < (1 - SHOWN) * before.total and fits:
            change = {"set": setting} | {key: cost[key] for key in ("total", "efficiency", "peak")}
            if "model.gradient_checkpointing" in setting:  # the memory without checkpointing was not measured
                del change["peak"]
            yield change
    if layout.processes > 1 and _limit(before) == "fixed":
        factor = ENOUGH / (1 - ENOUGH) * prices.fixed / (before.total - prices.fixed)
        for groups in _groups(config, math.ceil(config.train.groups * factor)):
            times = groups / config.train.groups
            cost = _as_json(budget.on_processes(layout.processes, times=times), work.times(times), prices)
            if cost["efficiency"] >= 0.98 * ENOUGH:  # the first guess may fall short, since fuller calls may be as fast
                yield {"set": {"train.groups": groups}} | {key: cost[key] for key in ("total", "efficiency", "peak")}
                return


def _groups(config: RunConfig, least: int) -> Iterator[int]:
    """Yield numbers of groups that divide among optimizer steps and processes: from `least` up, by a fifth each time."""
    train = config.train
    while True:
        most = min(least + train.updates * config.run.processes, MOST_SAMPLES // train.group_size + 1)
        fitting = (n for n in range(least, most) if _refusal(with_setting(config, "train.groups", n)) is None)
        groups = next(fitting, None)
        if groups is None:
            return
        yield groups
        least = math.ceil(1.2 * groups)


def _refusal(config: RunConfig) -> str | None:
    try:
        check_geometry(config.train, config.algorithm, config.run.processes)
    except InputError as error:
        return str(error)
    return None


def _limit(cost: Cost) -> str:
    return max(PARTS, key=cost.seconds.__getitem__)


def lines(found: dict[str, Any]) -> Iterator[str]:
    """Format the result of `price_run` for the terminal; yield its lines."""
    heads = ("machines", "samples", *PARTS, "total", "efficiency", "GiB", "GB sent")
    yield f"{'GPUs':>5}" + _row(heads, heads)
    for each in found["costs"]:
        cells = [
            str(each["machines"]),
            str(each["samples"]),
            *(f"{each['seconds'][part]:.1f}" for part in PARTS),
            f"{each['total']:.1f}",
            f"{each['efficiency']:.0%}",
            f"{each['peak'] / GIB:.1f}",
            f"{sum(each['sent'].values()) / 1e9:.1f}",
        ]
        yield f"{each['gpus']:>5}" + _row(cells, heads)
    gpu = found["gpu_type"]
    yield (
        f"seconds of an iteration on {gpu}, at {found['utilisation']:.0%} of its peak speed, or the time that a CPU core "
        "takes to launch the calls, if longer; samples, GiB and GB sent are for one GPU; fixed: work that more GPUs do not "
        "reduce, such as rewards, a guess (--fixed-seconds)"
    )
    if found["found"]:
        yield f"found when the run starts; counted here with the most that fits {gpu}: {as_overrides(found['found'])}"
    asked = next(each for each in found["costs"] if each["gpus"] == found["asked"])
    limit = found["limit"]
    yield f"on {counted(asked['gpus'], 'GPU')} {_LIMITS[limit]}: {asked['seconds'][limit]:.1f} of {asked['total']:.1f} s"
    short = [str(each["gpus"]) for each in found["costs"] if each["peak"] > found["gpu_bytes"]]
    if short:
        gpus = "1 GPU" if short == ["1"] else f"{', '.join(short)} GPUs"
        room = f"{found['gpu_bytes'] / GIB:.1f}"
        yield f"on {gpus} it does not fit the {room} GiB of each; --gpu-memory {room} shows what to set"
    if found["refused"] is not None:
        yield f"a run on {counted(asked['gpus'], 'GPU')} is refused: {found['refused']}"
    if found["idle"]:
        yield f"{found['idle']} of them have nothing to sample: take fewer GPUs, or raise train.groups"
    for change in found["changes"]:
        memory = f", {change['peak'] / GIB:.1f} GiB" if "peak" in change else "; --gpu-memory shows its memory"
        yield f"with {as_overrides(change['set'])}: {change['total']:.1f} s, efficiency {change['efficiency']:.0%}{memory}"


def _row(cells: Sequence[str], heads: Sequence[str]) -> str:
    return "".join(f"{cell:>{max(len(head), 6) + 2}}" for cell, head in zip(cells, heads, strict=True))


_LIMITS = {
    "rollout": "sampling takes the most",
    "decode": "decoding takes the most",
    "update": "the update takes the most",
    "evaluate": "evaluations, every eval.every iterations, take the most; run.evaluators (not planned) moves them elsewhere",
    "traffic": "waiting for other GPUs takes the most",
    "fixed": "the fixed part takes the most",
}
