"""The seconds of an iteration on any number of GPUs, from the operations and the bytes of its calls.

A call of m rows takes as long as its operations, at the share of a GPU's peak that published runs reach, as a core takes to
launch them, or as it waits for weights and gradients of other processes, whichever is longest. Ours, after what is usual of
training with shards:

 1. A backward pass costs one forward pass for the gradients of activations, and one more for those of weights, which under
    adapters hardly any have. Checkpointing makes the forward pass again.
 2. Calls are of `micro_batch` or `rollout_batch` rows, the last one of fewer. Whole trees stay on a GPU (whole groups, where
    a run keeps them so), and an iteration is as long as that of the GPU which has the most of them.
 3. What no GPU takes away (rewards, Python, checkpoints, pages) is one number, which is given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from flowgrpo.schema.sections import RunConfig
from flowgrpo.training.distributed.gpu_layout import Layout
from flowgrpo.training.planning.collective_traffic import Messages, of_rewards
from flowgrpo.training.planning.gpu_types import Gpu

UTILISATION = 0.45  # of a GPU's peak: what verl-omni reaches where it makes pictures; docs/scale.md has the run
LAUNCH = 27e-6  # seconds of a core for a function of PyTorch that computes; docs/scale.md has the measurement
FIXED = 20.0  # seconds, a guess
PARTS = ("rollout", "decode", "update", "evaluate", "traffic", "fixed")


@dataclass(frozen=True, kw_only=True)
class Calls:
    """Calls of one kind in an iteration, on all GPUs.

    Attributes:
        units: what is dealt to GPUs: trees, answers, prompts of an evaluation.
        width: rows of a unit that may share a call.
        sweeps: how often these go through the model.
        rows: of a call, at the most.
        operations: of a row.
        launches: functions of PyTorch in a call of any number of rows, which a core launches one after the other.
        gathers: how often a call gathers a network in shards; it may be several networks, or several calls of one.
        sums: how often it sums their gradients.
        parts: optimizer steps among which the rows are dealt; no call has rows of two.
    """

    units: int
    width: int = 1
    sweeps: float
    rows: int
    operations: float
    launches: int = 0
    gathers: int = 0
    sums: int = 0
    parts: int = 1

    def sizes(self, processes: int) -> list[tuple[float, int]]:
        """Numbers of calls on the GPU with the most units, and the rows of each."""
        own = -(-self.units // processes) * self.width
        parts = max(min(self.parts, own), 1)
        least, larger = divmod(own, parts)
        found = []
        for alike, size in ((larger, least + 1), (parts - larger, least)):
            full, rest = divmod(size, self.rows)
            found += [(alike * self.sweeps * count, rows) for count, rows in ((full, self.rows), (1, rest))]
        return [(count, rows) for count, rows in found if count and rows]


@dataclass(frozen=True, kw_only=True)
class Work:
    """What an iteration computes and sends.

    Attributes:
        samples: of all GPUs.
        calls: by the part of the iteration; those of an evaluation with `sweeps` of one iteration.
        steps: optimizer steps.
        trees: that samples are dealt in; answers, or whole groups of either.
        numbers: that are gathered of a sample beside its rewards.
        networks: shapes of the tensors of those that are trained or adapted.
        width: bytes of a weight that is not quantised.
        trained: how many numbers learn.
    """

    samples: int
    calls: Mapping[str, Sequence[Calls]]
    steps: int
    trees: int
    numbers: int
    networks: Sequence[Mapping[str, tuple[int, ...]]]
    width: int
    trained: int

    def times(self, factor: float) -> Work:
        """The same with about so many times the trees, and the evaluation as it is."""
        trees = round(self.trees * factor)
        calls = {
            part: [
                each if part == "evaluate" else replace(each, units=each.units * trees // self.trees) for each in own
            ]
            for part, own in self.calls.items()
        }
        return replace(self, samples=self.samples * trees // self.trees, trees=trees, calls=calls)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """An iteration on some GPUs.

    Attributes:
        layout: of the processes.
        samples: of the GPU that has the most.
        seconds: of each of `PARTS`; traffic is what calls wait for weights and gradients longer than they compute, and the
            sums of gradients that follow them.
        sent: bytes that a process sends: gathers, scatters, sums and rewards.
    """

    layout: Layout
    samples: int
    seconds: dict[str, float]
    sent: dict[str, int]

    @property
    def total(self) -> float:
        """Seconds of the iteration."""
        return sum(self.seconds.values())


def forwards_of(config: RunConfig) -> int:
    """How many forward passes a call costs whose gradient is taken, itself among them."""
    return 2 + (config.model.lora is None) + config.model.gradient_checkpointing


def cost_of(work: Work, layout: Layout, gpu: Gpu, sent: Messages, *, rate: float, fixed: float) -> Cost:
    """The cost of an iteration.

    Args:
        sent: the collectives of the run in this layout.
        rate: operations that a GPU does in a second.
        fixed: seconds that no GPU takes away.
    """
    processes = layout.processes
    seconds = dict.fromkeys(PARTS, 0.0) | {"fixed": fixed}
    counts = {"gathers": 0.0, "sums": 0.0}
    for part, calls in work.calls.items():
        for each in calls:
            waits = each.gathers * sent.gather.seconds(gpu) + each.sums * sent.scatter.seconds(gpu)
            for count, rows in each.sizes(processes):
                computes = max(rows * each.operations / rate, each.launches * LAUNCH)
                seconds[part] += count * computes
                seconds["traffic"] += count * (max(waits - computes, 0.0) + each.sums * sent.spread.seconds(gpu))
                counts["gathers"] += count * each.gathers
                counts["sums"] += count * each.sums
    seconds["traffic"] += work.steps * sent.step.seconds(gpu)
    samples = -(-work.trees // processes) * (work.samples // work.trees)
    return Cost(
        layout=layout,
        samples=samples,
        seconds=seconds,
        sent={
            "gathers": round(counts["gathers"] * sent.gather.bytes),
            "scatters": round(counts["sums"] * sent.scatter.bytes),
            "sums": round(counts["sums"] * sent.spread.bytes) + work.steps * sent.step.bytes,
            "rewards": of_rewards(work.numbers * samples, processes),
        },
    )
