"""Memory of a run: the peak of each phase, and the largest batches that fit.

A trial calls the model with one row of fake tensors (shapes without values). It measures the bytes that do not depend
on the batch size, and the bytes per row. All peaks and batch sizes are computed from these two.
"""

from __future__ import annotations

import functools
import re
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Self, TypeVar

from flowgrpo.schema.lora import Lora
from flowgrpo.schema.sections import RunConfig
from flowgrpo.training.distributed.gpu_layout import OF_NODE, Layout, detect_layout
from flowgrpo.training.model_files.hub_files import Shape
from flowgrpo.training.planning.allocation_counter import Peaks
from flowgrpo.training.weights import low_precision_copies, quantisation, sharding
from flowgrpo.training.weights.optimizers import MESSAGE, OPTIMIZERS

GIB = 2**30
LIBRARIES = GIB  # bytes of a GPU's context
FRAGMENTS = 0.05  # fraction of all bytes lost to fragmentation
GATHERED = 2.4  # blocks of a sharded network in memory at once: the one that computes, and copies of the next
BLOCK = re.compile(r".*?\.\d+\.")  # path of a block, in front of the names of its tensors
ROLLOUT, UPDATE = "train.rollout_batch", "train.micro_batch"
MOST = 2**31  # number of rows that stands for no limit
SWITCHES: tuple[tuple[str, Any], ...] = (
    ("model.cuda_graphs", False),
    ("model.text_encoders", "offload"),
    ("model.vae", "offload"),
    ("model.vae_tiling", True),
    ("model.gradient_checkpointing", True),
    (low_precision_copies.KEY, None),
    ("run.sharding", "fsdp2"),
    ("model.quantise", "int8"),
    ("model.quantise", "nf4"),
)
MEASURED = ("model.dtype", "model.lora")  # keys whose change needs a new trial

Config = TypeVar("Config", bound=RunConfig)
Sizes = TypeVar("Sizes", bound="TrialSizes")


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Peak memory of a phase."""

    name: str
    rows: int  # rows per call
    key: str | None  # config key that sets the rows; None if no key does
    fixed: dict[
        str, int
    ]  # bytes of weights, rewards, trained weights (with copies), optimizer, gradients, states, samples
    calls: Peaks  # bytes of activations

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by kind of memory: activations and the names in `fixed`."""
        return self.fixed | {"activations": self.calls.of(self.rows)}

    @property
    def total(self) -> int:
        """Peak bytes of the phase, including the GPU context and fragmentation."""
        return int(sum(self.parts.values()) * (1 + FRAGMENTS)) + LIBRARIES

    def largest(self, room: int) -> int:
        """Return the largest number of rows per call that fits into `room` bytes; 0 if one row does not fit."""
        left = (room - LIBRARIES + 1) / (1 + FRAGMENTS) - sum(self.fixed.values())
        rows = min(int((left - fixed) / each) if each else (fixed <= left) * MOST for fixed, each in self.calls.points)
        while rows > 0 and replace(self, rows=rows).total > room:  # correct rounding errors
            rows -= 1
        return max(min(rows, MOST), 0)


@dataclass(frozen=True, kw_only=True)
class TrialSizes:
    """Sizes of a model and of its calls, measured by a trial."""

    components: dict[str, int]  # bytes of the weights of each component as loaded
    shapes: dict[str, dict[str, Shape]]  # shapes of the tensors of each trained or adapted network
    width: int  # bytes of an unquantised weight
    trained: int  # number of trained parameters
    update: Peaks  # bytes of a forward and backward pass; empty if the config has checkpointing
    update_checkpointed: Peaks | None  # the same with checkpointing; None if a network does not support it
    dequantises: bool  # whether the calls include the weights that quantised layers dequantise


@dataclass(frozen=True, kw_only=True)
class Budget(ABC):
    """The memory that a run needs on each GPU."""

    config: RunConfig
    trial: TrialSizes
    measure: Callable[[Any], Any]  # returns the trial of a config whose `MEASURED` keys differ
    of_node: int = OF_NODE  # processes per machine

    @abstractmethod
    def phases(self) -> list[Phase]:
        """Return the phases of the run, each with the rows per call that the config sets."""

    @property
    @abstractmethod
    def unavailable(self) -> Collection[str]:
        """Keys of `SWITCHES` that have no effect on this model."""

    @property
    def layout(self) -> Layout:
        """Layout of the processes on machines."""
        return detect_layout(self.config, self.of_node)

    def on_processes(self, processes: int, *, times: float = 1) -> Self:
        """Return the budget on `processes` processes, for `times` times the samples per iteration."""
        return self.with_setting("run.processes", processes)

    def switches(self) -> list[tuple[str, Any]]:
        """Return the memory-saving settings that are possible and not set yet, cheapest first."""
        config, model = self.config, self.config.model
        needs_base = low_precision_copies.of_copies(config) or config.exchanges_base  # the base must stay unquantised
        possible = {
            "model.gradient_checkpointing": self.trial.update_checkpointed is not None,
            low_precision_copies.KEY: low_precision_copies.of_drafts(config) is not None,
            "run.sharding": config.run.processes > 1 and sharding.can(config),
            "model.quantise": model.lora is not None and model.quantise != "nf4" and not needs_base,
        }
        return [
            (key, value)
            for key, value in SWITCHES
            if key not in self.unavailable and possible.get(key, True) and at_key(config, key) != value
            if key != "model.quantise" or all(quantisation.can(self.trial.shapes, form) for form in ("int8", value))
        ]

    def resorts(self) -> list[tuple[str, Any]]:
        """Return settings that save memory but change the training, smallest change first."""
        model, train = self.config.model, self.config.train
        resorts = (
            ("train.optimizer.name", "adamw8bit", train.optimizer.name == "adamw"),
            ("train.ema", None, train.ema is not None),
            ("model.dtype", "bfloat16", model.dtype == "float32"),
            ("model.lora", {"rank": 16}, model.lora is None),
        )
        return [(key, value) for key, value, possible in resorts if possible]

    def with_setting(self, key: str, value: Any) -> Self:
        """Return the budget with one config key changed."""
        config = with_setting(self.config, key, value)
        return replace(self, config=config, trial=self.measure(config) if key in MEASURED else self.trial)

    def with_settings(self, settings: Mapping[str, Any]) -> Self:
        """Return the budget with several config keys changed."""
        return functools.reduce(lambda budget, setting: budget.with_setting(*setting), settings.items(), self)

    def loaded_bytes(self) -> dict[str, int]:
        """Return the bytes of each component as loaded, with the quantisation of the config."""
        trial, form = self.trial, self.config.model.quantise
        saved = {
            name: quantisation.size(shapes, trial.width, None) - quantisation.size(shapes, trial.width, form)
            for name, shapes in trial.shapes.items()
        }
        return {name: size - saved.get(name, 0) for name, size in trial.components.items()}

    def resident(self) -> int:
        """Return the bytes of the frozen components that each process holds."""
        learning = self.trial.shapes.keys() if self.config.model.lora is None else ()
        shared = dict.fromkeys(self.trial.shapes, self.layout.among)
        return sum(
            -(-size // shared.get(name, 1)) for name, size in self.loaded_bytes().items() if name not in learning
        )

    def gathered_bytes(self) -> int:
        """Return the peak bytes of gathered weights in a call of the largest sharded network; 0 without sharding."""
        model, trial = self.config.model, self.trial
        if self.layout.among == 1:
            return 0
        width = trial.width if model.lora else 4  # trained weights are sent in float32 or smaller
        size = functools.partial(quantisation.size, width=width, form=model.quantise)
        return max(gathered_bytes(tensors, size) for tensors in trial.shapes.values())

    def layer(self) -> int:
        """Return the bytes that dequantising a layer needs; 0 without quantisation or if the trial counted them."""
        if self.config.model.quantise is None or self.trial.dequantises:
            return 0
        return quantisation.dequantised_bytes(self.trial.shapes.values(), self.trial.width)

    def update_calls(self) -> Peaks:
        """Return the peak bytes of an update, over its calls with gradient and its optimizer step."""
        config, trial = self.config, self.trial
        checkpointed = trial.update_checkpointed if config.model.gradient_checkpointing else None
        blocks = self.gathered_bytes() * (
            1 if config.model.lora else 2
        )  # trained weights have gradients of the same size
        calls = (checkpointed or trial.update).split(config.run.context_parallel).beside(self.layer() + blocks)
        return calls | step(config, trial.trained, among=self.layout.among)

    def kept_graphs(self, room: int) -> dict[str, int]:
        """Return `rows` and `bytes` of the autograd graphs that a rollout may keep for the update.

        `rows` is the number of rows with a graph on all processes, `bytes` the size of the graphs on one process.
        `kept_rows` and `kept_bytes` are those that a rollout keeps on GPUs of `room` bytes. The base class keeps none.
        """
        return {"rows": 0, "bytes": 0, "kept_rows": 0, "kept_bytes": 0}

    def loading_bytes(self) -> int:
        """Return the most bytes of weights that a process holds in host memory while it loads the model for a GPU."""
        return sum(self.trial.components.values())

    def embeddings(self) -> dict[str, int]:
        """Return `prompts` and `bytes` of the embeddings that a process keeps in host memory, at most.

        The base class keeps none.
        """
        return {"prompts": 0, "bytes": 0}

    def largest(self, room: int) -> dict[str, int]:
        """Return the largest batch size that fits into `room` bytes, by key; 0 if one row does not fit."""
        rows: dict[str, list[int]] = {ROLLOUT: [], UPDATE: []}
        for phase in self.phases():
            for key in rows if phase.key is None else (phase.key,):
                rows[key].append(phase.largest(room) if phase.key else (phase.total <= room) * MOST)
        return {key: min(counts) for key, counts in rows.items()}

    def peak(self, rows: dict[str, int] | None = None) -> int:
        """Return the bytes of the largest phase; `rows` overrides batch sizes by config key."""
        return max(phase.total for phase in at(self.phases(), rows or {}))

    def smallest(self) -> int:
        """Return the peak with one row in each call."""
        return self.peak({ROLLOUT: 1, UPDATE: 1})

    def fits(self, room: int) -> bool:
        """Return whether calls of one row fit into `room` bytes."""
        return all(self.largest(room).values())


def measure_once(config: Config, trial_of: Callable[[Config], Sizes]) -> Callable[[RunConfig], Sizes]:
    """Return a function that runs `trial_of` on a config, once for each dtype, with adapters and without."""

    @cache
    def measure(dtype: str, full: bool) -> Sizes:
        lora = None if full else config.model.lora or Lora()
        model = config.model.model_copy(update={"dtype": dtype, "lora": lora})
        return trial_of(config.model_copy(update={"model": model}))

    return lambda other: measure(other.model.dtype, other.model.lora is None)


def at(phases: Sequence[Phase], rows: dict[str, int]) -> list[Phase]:
    """Return the phases with the batch sizes `rows`, which are given by config key."""
    return [phase if phase.key is None else replace(phase, rows=rows.get(phase.key, phase.rows)) for phase in phases]


def at_key(config: Any, key: str) -> Any:
    """Return the value at a dotted key."""
    return functools.reduce(getattr, key.split("."), config)


def with_setting(config: Any, key: str, value: Any) -> Any:
    """Return a config or section with a dotted key changed. A map as the value of `lora` becomes a `Lora`."""
    head, _, rest = key.partition(".")
    if rest:
        value = with_setting(getattr(config, head), rest, value)
    elif head == "lora" and isinstance(value, Mapping):
        value = Lora(**value)
    return config.model_copy(update={head: value})


def gathered_bytes(tensors: Mapping[str, Shape], size: Callable[[Mapping[str, Shape]], int]) -> int:
    """Return the peak bytes of gathered weights in a call of a sharded network.

    They are the bytes of all tensors outside of blocks, and `GATHERED` times those of the largest block. `size` returns
    the bytes of tensors of given shapes.
    """
    blocks: dict[str, dict[str, Shape]] = defaultdict(dict)
    for name, shape in tensors.items():
        block = BLOCK.match(name)
        blocks[block[0] if block else ""][name] = shape
    outside = size(blocks.pop("", {}))
    return outside + round(GATHERED * max(map(size, blocks.values()), default=0))


def trained_bytes(config: RunConfig, trained: int, *, copies: int, among: int) -> dict[str, int]:
    """Return the bytes of trained weights, optimizer moments and gradients, which are in memory in all phases.

    Args:
        trained: number of trained parameters.
        copies: number of other policies in memory, such as a reference, without the average and stale versions.
        among: number of processes that share one copy of the networks.
    """
    trained = trained if config.model.lora else -(-trained // among)
    versions = config.run.staleness + 1 if config.run.staleness else 0
    copies += 1 + (config.train.ema is not None) + versions
    moments = OPTIMIZERS[config.train.optimizer.name].bytes_per_number
    return {"trained": 4 * copies * trained, "optimizer": round(moments * trained), "gradients": 4 * trained}


def step(config: RunConfig, trained: int, *, among: int) -> Peaks:
    """Return the temporary bytes of an optimizer step: two gradient buffers if processes sum unsharded gradients, else 0."""
    sums = config.run.processes > 1 and not (config.model.lora is None and among > 1)
    return Peaks(((2 * min(4 * trained, MESSAGE) if sums else 0, 0),))
