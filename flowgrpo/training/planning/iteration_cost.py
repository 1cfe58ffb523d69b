"""Seconds of an iteration on any number of GPUs, from the operations and bytes of its calls.

A call takes as long as the slowest of three: its operations at the share of a GPU's peak that published runs reach, the
launches of its kernels by a CPU core, and its collectives. Our assumptions, usual for sharded training:

 1. A backward pass costs two forward passes, under adapters one. Checkpointing adds one.
 2. Calls have `micro_batch` or `rollout_batch` rows, the last one fewer. The GPU with the most trees sets the time.
 3. What no GPU speeds up (rewards, Python, checkpoints, pages) is one given number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flowgrpo.schema.sections import RunConfig
from flowgrpo.training.distributed.gpu_layout import Layout
from flowgrpo.training.distributed.minibatches import kept_whole
from flowgrpo.training.planning.collective_traffic import Messages, reward_bytes
from flowgrpo.training.planning.gpu_types import Gpu
from flowgrpo.training.planning.memory_budget import Budget

UTILISATION = 0.45  # of a GPU's peak: what verl-omni reaches where it makes pictures; docs/scale.md has the run
LAUNCH = 27e-6  # seconds of a core per PyTorch function that computes; docs/scale.md has the measurement
FIXED = 20.0  # seconds, a guess
PARTS = ("rollout", "decode", "update", "evaluate", "traffic", "fixed")


@dataclass(frozen=True, kw_only=True)
class Calls:
    """Calls of one kind in an iteration, on all GPUs."""

    units: int  # trees, answers or prompts, which are dealt to GPUs
    width: int = 1  # rows per unit that may share a call
    sweeps: float  # how often all rows go through the model
    rows: int  # most rows of a call
    operations: float  # per row
    launches: int = 0  # PyTorch functions per call
    gathers: int = 0  # all-gathers of a network per call
    sums: int = 0  # reductions of gradients per call
    parts: int = 1  # optimizer steps among which the rows are dealt; no call mixes rows of two

    def sizes(self, processes: int) -> list[tuple[float, int]]:
        """Return (number of calls, rows of each) on the GPU with the most units."""
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
    calls: Mapping[str, Sequence[Calls]]  # by part of the iteration; evaluations are averaged over iterations
    steps: int  # of the optimizer
    trees: int  # units in which samples are dealt: trees, answers, or whole groups of either
    numbers: int  # gathered per sample
    networks: Sequence[Mapping[str, tuple[int, ...]]]  # this and below: see `memory_phases.TrialSizes`
    width: int
    trained: int

    def times(self, factor: float) -> Work:
        """Scale the trees by about `factor`; the evaluation stays."""
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
    """A forward pass: operations per row, launches, and calls of networks, each of which gathers one in shards."""

    operations: int
    launches: int = 0
    networks: int = 1

    def calls(self, *, forwards: int = 1, backward: bool = False, **shape: Any) -> Calls:
        """Return calls that cost `forwards` passes; a backward pass gathers the networks again and sums gradients."""
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
    """Return the work of an iteration without decoding; if the plan's counts are upper bounds, so is this.

    Args:
        planned: the plan of the run, with its counts.
        rollout, update, evaluate: a step of sampling, a scored state or view, and a step of evaluation.
        parts: of the rollout's calls.
    """
    config, trial, g, counts = budget.config, budget.trial, planned["geometry"], planned["model_evaluations"]
    train, evaluation, samples = config.train, planned["evaluation"], g["samples"]
    trees = g["groups"] if kept_whole(train, config.algorithm) else g["groups"] * g.get("roots", g["group_size"])
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
    """Cost of an iteration; traffic is the time that calls wait longer than they compute, plus sums of gradients."""

    layout: Layout
    samples: int  # on the GPU with the most
    seconds: dict[str, float]  # of each of `PARTS`
    sent: dict[str, int]  # bytes of a process, by kind

    @property
    def total(self) -> float:
        """Seconds of the iteration."""
        return sum(self.seconds.values())


def forwards_of(config: RunConfig) -> int:
    """Return the cost of a call with its backward pass, in forward passes."""
    return 2 + (config.model.lora is None) + config.model.gradient_checkpointing


def cost_of(work: Work, layout: Layout, gpu: Gpu, sent: Messages, *, rate: float, fixed: float) -> Cost:
    """Return the cost of an iteration, at `rate` operations per second and with `fixed` seconds that no GPU speeds up."""
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
