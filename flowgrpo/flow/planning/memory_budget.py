"""The memory of a flow model's run, from what `flow.planning.memory_trace` measured (`flowgrpo plan --gpu-memory`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from typing_extensions import override

from flowgrpo.data import embedded, stored
from flowgrpo.data.prompts import Row
from flowgrpo.flow.config import Config
from flowgrpo.flow.pipeline.loading import load, meta_pipeline
from flowgrpo.flow.pipeline.networks.switches import DECODERS
from flowgrpo.flow.pipeline.networks.traits import ENCODERS, is_network
from flowgrpo.flow.planning.iteration_forecast import kept, most_graphs
from flowgrpo.flow.planning.memory_trace import Sampling, Trial, trial
from flowgrpo.flow.planning.plan import call_and_branches
from flowgrpo.flow.updates.rollout_graphs import ROOM
from flowgrpo.schema.lora import Lora
from flowgrpo.training.distributed.gpu_layout import OF_NODE
from flowgrpo.training.planning.allocation_counter import Peaks
from flowgrpo.training.planning.memory_budget import (
    ROLLOUT,
    UPDATE,
    Budget,
    Phase,
    at_key,
    can_share,
    fitted,
    gathers,
    learnt,
    lines,
    rewards_of,
    step,
    switched,
)
from flowgrpo.training.planning.meta_networks import few_objects
from flowgrpo.training.scoring.group_scores import WAITING
from flowgrpo.training.weights import low_precision_copies, quantisation

__all__ = ["budget_of", "fit", "lines"]

SWITCHES = (
    ("model.text_encoders", "offload"),
    ("model.vae", "offload"),
    ("model.vae_tiling", True),
    ("model.gradient_checkpointing", True),
    ("train.draft.precision", None),
    ("run.sharding", "fsdp2"),
    ("model.quantise", "int8"),
    ("model.quantise", "nf4"),
)
MEASURED = ("model.dtype", "model.lora")  # what a trial was made with


@dataclass(frozen=True, kw_only=True)
class FlowBudget(Budget):
    """The memory of a flow model's run.

    Attributes:
        config: of the run, with a switch set perhaps.
        trial: what its calls allocate.
        states: how many latent states of a rollout stay until they are trained on, on all processes.
        graphs: how many rows a rollout may keep the graphs of, on all processes; see `flow.updates.rollout_graphs`.
        graph_times: of the schedule, at which these lie.
        samples: of an iteration, on all processes.
        group: samples of the largest group.
        loads_later: whether the pipeline can load its networks when the prompts are encoded.
        measure: the trial of a run that trains other numbers, or computes in another type.
    """

    config: Config
    trial: Trial
    states: int
    graphs: int
    graph_times: int
    samples: int
    group: int
    loads_later: bool
    measure: Callable[[Config], Trial]
    of_node: int = OF_NODE

    @override
    def on_processes(self, processes: int, *, times: float = 1) -> FlowBudget:
        config = switched(self.config, "run.processes", processes)
        counts = ("states", "graphs", "samples")
        return replace(self, config=config, **{name: math.ceil(getattr(self, name) * times) for name in counts})

    @override
    def phases(self) -> list[Phase]:
        model, train, trial = self.config.model, self.config.train, self.trial
        shares, among = self.config.run.shares, self.layout.among
        loaded = trial.components | {name: self._frozen(name) for name in trial.shapes}
        encoders = sum(size for name, size in loaded.items() if name.startswith(ENCODERS))
        shared = loaded | {name: -(-loaded[name] // among) for name in trial.shapes}
        decoders = sum(size for name, size in loaded.items() if name in DECODERS)
        away = decoders if model.vae == "offload" else 0
        later = self.loads_later and model.text_encoders != "keep"
        networks = sum(size for name, size in loaded.items() if is_network(name) and later)
        resident = sum(size for name, size in shared.items() if model.lora or name not in trial.shapes) - away
        stay = {
            "weights": resident if model.text_encoders == "keep" else resident - encoders,
            **learnt(self.config, trial.trained, copies=self._copies(), among=among),
            "states": -(-self.states // shares) * trial.state
            + self.graph_bytes * (self.config.train.replay == "never"),
        }
        if self.config.exchanges_base:
            stay["weights"] += sum(loaded[name] for name in trial.shapes)
        drafts = self._draft_copy()
        stay["weights"] += drafts if model.lora else 0  # otherwise they are made while starts are drafted
        while_drafted = stay | {"weights": stay["weights"] + (0 if model.lora else drafts)}
        of_group, degree = self.group * trial.rollout.sample, self.config.run.context_parallel
        waiting = min(-(-self.samples // shares), WAITING * self.group) * trial.rollout.sample
        layer, gathered, rows = (
            self._layer(),
            gathers(self.config, trial.shapes.values(), trial.width, among=among),
            train.rollout_rows,
        )
        with_gradients = gathered * (1 if model.lora else 2)  # of a block, until they are summed
        checkpointed = trial.update_checkpointed if model.gradient_checkpointing else None
        update = (checkpointed or trial.update).shared(degree).beside(layer + with_gradients)
        update |= step(self.config, trial.trained, among=among)
        encode = {"weights": sum(loaded.values()) - networks}
        decoding = while_drafted | {"weights": while_drafted["weights"] + away, "samples": waiting}
        joined = stay | {"samples": waiting + of_group}  # a group, and its parts
        found = [
            Phase(name="encode", rows=1, key=None, fixed=encode, calls=Peaks(((0, trial.encode),))),
            Phase(
                name="rollout",
                rows=rows,
                key=ROLLOUT,
                fixed=while_drafted,
                calls=trial.rollout.step.shared(degree).beside(max(layer, self._layer_of_drafts()) + gathered),
            ),
            Phase(name="decode", rows=rows, key=ROLLOUT, fixed=decoding, calls=self._decode(trial.rollout)),
            Phase(name="reward", rows=self.group, key=None, fixed=joined, calls=Peaks()),
            Phase(name="update", rows=train.update_rows, key=UPDATE, fixed=stay, calls=update),
        ]
        if trial.evaluate is not None:
            calls = trial.evaluate.step.shared(degree).beside(layer + gathered) | self._decode(trial.evaluate).beside(
                away
            )
            found.append(Phase(name="evaluate", rows=rows, key=ROLLOUT, fixed=stay, calls=calls))
        return found

    @property
    def graph_bytes(self) -> int:
        """Bytes of all graphs that a process's rollout may keep."""
        checkpointed, degree = self.config.model.gradient_checkpointing, self.config.run.context_parallel
        kept = self.trial.graph_checkpointed if checkpointed else self.trial.graph
        rows, size = -(-self.graphs // self.config.run.shares), self.config.train.rollout_rows
        return replace(kept, each=-(-kept.each // degree)).of(rows, times=self.graph_times, size=size)

    @override
    def kept_graphs(self, room: int) -> dict[str, Any]:
        word = self.config.train.replay
        fits = self.graph_bytes <= ROOM * (room - self.peak())  # about, for a run asks what is free
        return {
            "rows": self.graphs,
            "bytes": self.graph_bytes,
            "kept": self.graphs > 0 and (word == "never" or (word == "auto" and fits)),
        }

    @override
    def switches(self) -> list[tuple[str, Any]]:
        model, trial = self.config.model, self.trial
        impossible = {
            "model.vae_tiling": trial.rollout.decode_tiled is None,
            "model.gradient_checkpointing": trial.update_checkpointed is None,
            "model.quantise": model.lora is None
            or model.quantise == "nf4"
            or low_precision_copies.of_copies(self.config)
            or self.config.exchanges_base
            or not quantisation.can(trial.shapes, "int8"),
            "model.text_encoders": model.text_encoders == "free",
            "run.sharding": not can_share(self.config),
            "train.draft.precision": low_precision_copies.of_drafts(self.config) is None,
        }
        return [
            (key, value)
            for key, value in SWITCHES
            if not impossible.get(key, False) and at_key(self.config, key) != value
            if value != "nf4" or quantisation.can(trial.shapes, "nf4")
        ]

    @override
    def switched(self, key: str, value: Any) -> FlowBudget:
        config = switched(self.config, key, value)
        return replace(self, config=config, trial=self.measure(config) if key in MEASURED else self.trial)

    def _frozen(self, name: str) -> int:
        """Bytes of a network as it is loaded, quantised where it is."""
        shapes, width = self.trial.shapes[name], self.trial.width
        spared = quantisation.size(shapes, width, None) - quantisation.size(shapes, width, self.config.model.quantise)
        return self.trial.components[name] - spared

    def _layer(self) -> int:
        """Bytes of the weights that one quantised layer makes anew, where they were not among what was measured."""
        if self.config.model.quantise is None or self.trial.dequantises:
            return 0
        return quantisation.made_anew(self.trial.shapes.values(), self.trial.width)

    def _draft_copy(self) -> int:
        """Bytes of the copies that drafts are sampled by, and trees finished."""
        width, words = self._width_of_linear(), low_precision_copies.of_copies(self.config)
        return sum(
            low_precision_copies.size(shapes, width, word) for shapes in self.trial.shapes.values() for word in words
        )

    def _layer_of_drafts(self) -> int:
        """Bytes of the weights that one layer of such a copy makes anew."""
        if not low_precision_copies.of_copies(self.config).keys() - {"bfloat16"}:
            return 0
        return quantisation.made_anew(self.trial.shapes.values(), self._width_of_linear())

    def _width_of_linear(self) -> int:
        """Bytes of a number of the networks: those that learn are float32."""
        return self.trial.width if self.config.model.lora else 4

    def _decode(self, sampling: Sampling) -> Peaks:
        tiled = sampling.decode_tiled if self.config.model.vae_tiling else None
        return tiled or sampling.decode

    def _copies(self) -> int:
        """How many other policies are copies of what is learned: the reference perhaps, the old one, and snapshots."""
        algorithm, lora = self.config.algorithm, self.config.model.lora
        reference = algorithm.reference
        begun = lora is None or (lora.path is not None and reference == "fixed")  # as something else than the base
        copied = begun or reference == "moving" or (reference == "teacher" and not self.config.exchanges_base)
        return (reference is not None and copied) + (algorithm.old is not None) + algorithm.snapshots


def fit(config: Config, gpu_bytes: int) -> dict[str, Any]:
    """Whether a run fits a GPU, and what to set where it does not; see `training.planning.memory_budget.fitted`.

    Raises:
        InputError: there are no configs of the model, or the run asks for what its pipeline has not.
    """
    with budget_of(config) as found:
        return fitted(found, gpu_bytes, rewards_of(config)[1])


@contextmanager
def budget_of(config: Config, of_node: int = OF_NODE) -> Iterator[FlowBudget]:
    """The memory of a run whose machines have so many GPUs, as long as the context is open; see `fit`."""
    longest = max(stored.train_prompts(config), key=lambda p: len(p.text))
    rewards = rewards_of(config)[0]
    own = {**embedded.call_of(config.model.path), **config.model.call}
    with meta_pipeline.configs(config.model.path) as folder, few_objects():
        placed = switched(switched(config, "model.path", folder), "model.call", own)

        @cache
        def of_kind(dtype: str, full: bool) -> Trial:
            model = placed.model.model_copy(update={"dtype": dtype})
            lora = None if full else model.lora or Lora()
            other = config.model_copy(update={"model": model.model_copy(update={"lora": lora})})
            measured = trial(other, folder, Row(longest.text, 0, longest.columns))
            return replace(measured, components=measured.components | {"rewards": rewards})

        def measure(other: Config) -> Trial:
            return of_kind(other.model.dtype, other.model.lora is None)

        measured = measure(config)
        states, group = kept(config, call_and_branches(placed, columns=longest.columns)[0]["num_inference_steps"])
        yield FlowBudget(
            config=config,
            trial=measured,
            states=states,
            **_graphs(placed, longest.columns),
            samples=config.train.groups * group,
            group=group,
            loads_later=load.loads_later(folder),
            measure=measure,
            of_node=of_node,
        )


def _graphs(config: Config, columns: dict[str, Any]) -> dict[str, int]:
    """Rows whose graphs a rollout may keep, and the times at which they lie."""
    if config.train.replay == "always":
        return {"graphs": 0, "graph_times": 0}
    cost = most_graphs(config, call_and_branches(config, columns=columns)[0]["num_inference_steps"])
    return {"graphs": cost.graphs, "graph_times": cost.graph_times}
