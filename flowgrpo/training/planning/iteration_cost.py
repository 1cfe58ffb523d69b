"""Seconds of an iteration on any number of GPUs, from the FLOPs and bytes of its calls.

A call takes as long as the slowest of three: its FLOPs, at the fraction of a GPU's peak that published runs reach; the
launches of its kernels by a CPU core; and its collectives. Our assumptions, usual for sharded training:

 1. A backward pass costs two forward passes; with adapters it costs one. Checkpointing adds one.
 2. Calls have `micro_batch` or `rollout_batch` rows; the last one may have fewer. The GPU with the most trees sets the
    time.
 3. Work that GPUs do not speed up (rewards, Python, checkpoints, HTML pages) takes a given number of seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flowgrpo.schema.sections import RunConfig
from flowgrpo.training.distributed.gpu_layout import Layout
from flowgrpo.training.distributed.minibatches import whole_groups_setting
from flowgrpo.training.planning.collective_traffic import Messages, reward_bytes
from flowgrpo.training.planning.gpu_types import Gpu
from flowgrpo.training.planning.memory_budget import Budget

UTILISATION = 0.45  # fraction of a GPU's peak that verl-omni reaches when it samples images; see docs/research/scale.md
LAUNCH = 27e-6  # seconds of a CPU core per PyTorch function, without views; see docs/research/scale.md
FIXED = 20.0  # seconds, a guess
PARTS = ("rollout", "decode", "update", "evaluate", "traffic", "fixed")


@dataclass(frozen=True, kw_only=True)
class Calls:
    """Calls of one kind in an iteration, on all GPUs."""

    units: int  # number of trees, answers or prompts, which are distributed over GPUs
    width: int = 1  # rows per unit that may share a call
    sweeps: float  # number of times that all rows go through the model
    rows: int  # largest number of rows per call
    operations: float  # FLOPs per row
    launches: int = 0  # PyTorch functions per call
    gathers: int = 0  # all-gathers of a network per call
    sums: int = 0  # reductions of gradients per call
    parts: int = 1  # number of parts that the rows are divided into; no call mixes rows of two parts

    def sizes(self, processes: int) -> list[tuple[float, int]]:
        """Return pairs (number of calls, rows per call) for the GPU with the most units."""
        rows = -(-self.units // processes) * self.width
        parts = max(min(self.parts, rows), 1)
        least, larger = divmod(rows, parts)
        sizes = []
        for alike, size in ((larger, least + 1), (parts - larger, least)):
            full, rest = divmod(size, self.rows)
            sizes += [(alike * self.sweeps * count, rows) for count, rows in ((full, self.rows), (1, rest))]
        return [(count, rows) for count, rows in sizes if count and rows]


@dataclass(frozen=True, kw_only=True)
class Work:
    """Calls and data of an iteration on all GPUs."""

    samples: int
    calls: Mapping[str, Sequence[Calls]]  # by name in `PARTS`; evaluations are averaged over iterations
    steps: int  # number of optimizer steps
    trees: int  # number of units in which samples are distributed over GPUs: trees, answers, or groups of them
    numbers: int  # numbers gathered per sample
    # networks, width, trained: see `memory_phases.TrialSizes`
    networks: Sequence[Mapping[str, tuple[int, ...]]]
    width: int
    trained: int

    def times(self, factor: float) -> Work:
        """Return the work with about `factor` times as many trees, and the same evaluation."""
        trees = round(self.trees * factor)
        calls = {
            part: calls
            if part == "evaluate"
            else [replace(each, units=each.units * trees // self.trees) for each in calls]
            for part, calls in self.calls.items()
        }
        return replace(self, samples=self.samples * trees // self.trees, trees=trees, calls=calls)


@dataclass(frozen=True, kw_only=True)
class Forward:
    """The cost of a forward pass."""

    operations: int  # FLOPs per row
    launches: int = 0  # PyTorch functions
    networks: int = 1  # calls of networks; with sharding, each gathers its network

    def calls(self, *, forwards: int = 1, backward: bool = False, **shape: Any) -> Calls:
        """Return calls that cost `forwards` forward passes; `shape` are the other fields of `Calls`."""
        return Calls(
            operations=forwards * self.operations,
            launches=forwards * self.launches,
            gathers=(1 + backward) * self.networks,
            sums=backward * self.networks,
            **shape,
        )


def work_of(
    budget: Budget,
    planned: Mapping[str, Any],
    *,
    rollout: Forward,
    update: Forward,
    evaluate: Forward,
    parts: int,
    numbers: int,
) -> Work:
    """Return the work of an iteration without decoding. It is an upper bound if the counts in `planned` are upper bounds.

    Args:
        planned: the plan of the run, with its counts of samples and model evaluations.
        rollout, update, evaluate: forward passes of a sampling step, of a scored state or view, and of an evaluation
            step.
        parts: see `Calls.parts`, for the rollout.
        numbers: numbers gathered per sample.
    """
    config, trial, g, counts = budget.config, budget.trial, planned["geometry"], planned["model_evaluations"]
    train, evaluation, samples = config.train, planned["evaluation"], g["samples"]
    trees = (
        g["groups"] if whole_groups_setting(train, config.algorithm) else g["groups"] * g.get("roots", g["group_size"])
    )
    width, views = samples // trees, g.get("views", 1)
    scored = samples * g.get("views", g["guidance_branches"])  # rows of one sweep of the update
    learning = planned["with_gradient"] / scored
    updating = {"units": trees, "width": width * views, "rows": train.update_rows, "parts": train.updates}
    steps = evaluation["model_evaluations"] / max(1, evaluation["decoded"] * planned["evaluation_branches"])
    return Work(
        samples=samples,
        calls={
            "rollout": [
                rollout.calls(
                    units=trees,
                    width=width,
                    sweeps=counts["rollout"] / (samples * g["guidance_branches"]),
                    rows=train.rollout_rows,
                    parts=parts,
                )
            ],
            "update": [
                update.calls(forwards=forwards_of(config), backward=True, sweeps=learning, **updating),
                update.calls(sweeps=counts["update"] / scored - learning, **updating),
            ],
            "evaluate": [
                evaluate.calls(units=evaluation["decoded"], sweeps=steps / config.eval.every, rows=train.rollout_rows)
            ],
        },
        steps=train.updates * g.get("passes", 1),
        trees=trees,
        numbers=numbers,
        networks=list(trial.shapes.values()),
        width=trial.width,
        trained=trial.trained,
    )


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Cost of an iteration."""

    layout: Layout
    samples: int  # number on the GPU with the most samples
    seconds: dict[str, float]  # by name in `PARTS`; traffic: gathers beyond the time of computation, and gradient sums
    sent: dict[str, int]  # bytes that a process sends, by kind

    @property
    def total(self) -> float:
        """Seconds of the iteration."""
        return sum(self.seconds.values())


def forwards_of(config: RunConfig) -> int:
    """Return the cost of a call with its backward pass, in forward passes."""
    return 2 + (config.model.lora is None) + config.model.gradient_checkpointing


def cost_of(work: Work, layout: Layout, gpu: Gpu, sent: Messages, *, rate: float, fixed: float) -> Cost:
    """Return the cost of an iteration, at `rate` FLOP/s and with `fixed` seconds that GPUs do not speed up."""
    processes = layout.processes
    seconds = dict.fromkeys(PARTS, 0.0) | {"fixed": fixed}
    gathers = sums = 0.0
    for part, calls in work.calls.items():
        for each in calls:
            waits = each.gathers * sent.gather.seconds(gpu) + each.sums * sent.scatter.seconds(gpu)
            for count, rows in each.sizes(processes):
                computes = max(rows * each.operations / rate, each.launches * LAUNCH)
                seconds[part] += count * computes
                seconds["traffic"] += count * (max(waits - computes, 0.0) + each.sums * sent.spread.seconds(gpu))
                gathers += count * each.gathers
                sums += count * each.sums
    seconds["traffic"] += work.steps * sent.step.seconds(gpu)
    samples = -(-work.trees // processes) * (work.samples // work.trees)
    bytes_sent = {
        "gathers": round(gathers * sent.gather.bytes),
        "scatters": round(sums * sent.scatter.bytes),
        "sums": round(sums * sent.spread.bytes) + work.steps * sent.step.bytes,
        "rewards": reward_bytes(work.numbers * samples, processes),
    }
    return Cost(layout=layout, samples=samples, seconds=seconds, sent=bytes_sent)
