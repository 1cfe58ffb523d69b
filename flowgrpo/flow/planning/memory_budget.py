"""Memory of a flow model's run, from the sizes of `flow.planning.memory_trace` (`flowgrpo plan --gpu-memory`)."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from typing_extensions import override

from flowgrpo.data import embedded, prompts, stored
from flowgrpo.data.prompts import Row
from flowgrpo.flow.config import Config
from flowgrpo.flow.model.memory_estimate import policy_copies
from flowgrpo.flow.pipeline.loading import load, meta_pipeline
from flowgrpo.flow.pipeline.networks.switches import DECODERS
from flowgrpo.flow.pipeline.networks.traits import ENCODERS, is_network
from flowgrpo.flow.planning.iteration_forecast import count_kept, most_graphs
from flowgrpo.flow.planning.memory_trace import Sampling, Trial, trial
from flowgrpo.flow.planning.plan import call_and_branches
from flowgrpo.flow.rollouts.prompt_encoding import count_prompts
from flowgrpo.flow.updates.rollout_graphs import ROOM, Kept
from flowgrpo.training.distributed.gpu_layout import OF_NODE
from flowgrpo.training.planning.allocation_counter import Peaks
from flowgrpo.training.planning.memory_budget import check_fit
from flowgrpo.training.planning.memory_phases import (
    ROLLOUT,
    UPDATE,
    Budget,
    Phase,
    measure_once,
    trained_bytes,
    with_setting,
)
from flowgrpo.training.planning.meta_networks import few_objects
from flowgrpo.training.planning.reward_memory import reward_bytes
from flowgrpo.training.prompts import second_stage
from flowgrpo.training.scoring.group_scores import WAITING
from flowgrpo.training.weights import low_precision_copies, quantisation


@dataclass(frozen=True, kw_only=True)
class FlowBudget(Budget):
    """The memory of a flow model's run; counts are those of an iteration on all processes."""

    config: Config
    trial: Trial
    states: int  # latent states that a rollout keeps until they are trained on
    graphs: tuple[int, ...]  # rows at each trained step whose graphs a rollout may keep (`flow.updates.rollout_graphs`)
    samples: int  # samples of a rollout
    group: int  # samples of the largest group
    train_prompts: int  # training prompts
    held_out: int  # held-out prompts
    loads_later: bool  # whether the networks can load after the prompts are encoded

    @override
    def on_processes(self, processes: int, *, times: float = 1) -> FlowBudget:
        counts = {name: math.ceil(getattr(self, name) * times) for name in ("states", "samples")}
        graphs = tuple(math.ceil(rows * times) for rows in self.graphs)
        return replace(self.with_setting("run.processes", processes), graphs=graphs, **counts)

    @override
    def phases(self) -> list[Phase]:
        config, model, train, trial = self.config, self.config.model, self.config.train, self.trial
        shards, rows, loaded = config.run.shards, train.rollout_rows, self.loaded_bytes()
        encoders = sum(size for name, size in loaded.items() if name.startswith(ENCODERS))
        away = sum(loaded.get(name, 0) for name in DECODERS) if model.vae == "offload" else 0
        later = self.loads_later and model.text_encoders != "keep"
        base = sum(loaded[name] for name in trial.shapes)
        copies = self._low_precision_copies()
        weights = self.resident() - away - (0 if model.text_encoders == "keep" else encoders)
        weights += (base if config.exchanges_base else 0) + (copies if model.lora else 0)
        graphs = self.graph_bytes(len(self.graphs)) if train.replay == "never" else 0
        rewards = {"rewards": reward_bytes(config)}
        stay = {
            "weights": weights,
            **rewards,
            **trained_bytes(config, trial.trained, copies=policy_copies(config), among=self.layout.among),
            "states": -(-self.states // shards) * trial.state + graphs,
        }
        # Low-precision copies of fully trained weights exist only while starts are drafted.
        drafting = stay | {"weights": weights + (0 if model.lora else copies)}
        # Samples that wait for their scores, and those of groups that share a call of the decoder with them.
        waiting = min(-(-self.samples // shards), WAITING * self.group + rows) * trial.rollout.sample
        decoding = drafting | {"weights": drafting["weights"] + away, "samples": waiting}
        scoring = stay | {"samples": waiting + self.group * trial.rollout.sample}  # a group, and the samples that wait
        encoding = {"weights": sum(size for name, size in loaded.items() if not (later and is_network(name)))} | rewards
        degree, gathered, decode = config.run.context_parallel, self.gathered_bytes(), self._decode(trial.rollout)
        step = trial.rollout.step.beside(0, self._products()).split(degree)
        sample = step.beside(max(self.layer(), self._copied_layer()) + gathered)
        phases = [
            Phase(name="encode", rows=1, key=None, fixed=encoding, calls=Peaks(((0, trial.encode),))),
            Phase(name="rollout", rows=rows, key=ROLLOUT, fixed=drafting, calls=sample),
            Phase(name="decode", rows=rows, key=ROLLOUT, fixed=decoding, calls=decode),
            Phase(name="reward", rows=self.group, key=None, fixed=scoring, calls=Peaks()),
            Phase(name="update", rows=train.update_rows, key=UPDATE, fixed=stay, calls=self.update_calls()),
        ]
        captured = sample  # whose activations CUDA graphs keep
        if trial.evaluate is not None:
            held_out = trial.evaluate.step.split(degree).beside(self.layer() + gathered)
            captured |= held_out
            held_out |= self._decode(trial.evaluate).beside(away)
            phases.append(Phase(name="evaluate", rows=rows, key=ROLLOUT, fixed=stay, calls=held_out))
        if not model.cuda_graphs:
            return phases
        as_rollouts = (
            (ROLLOUT,) if train.rollout_batch else (ROLLOUT, UPDATE)
        )  # keys that set the rows of captured calls
        graphs = {
            key: captured if key in as_rollouts else Peaks(((captured.of(rows), 0),)) for key in (None, ROLLOUT, UPDATE)
        }
        return [phases[0], *(replace(phase, calls=phase.calls + graphs[phase.key]) for phase in phases[1:])]

    def graph_bytes(self, steps: int) -> int:
        """Return the bytes of the graphs that a process's rollout may keep of the first `steps` trained steps."""
        return self._graph.of(self._graph_rows[:steps], size=self.config.train.rollout_rows)

    @property
    def _graph(self) -> Kept:
        trial = self.trial
        graph = trial.graph_checkpointed if self.config.model.gradient_checkpointing else trial.graph
        return replace(graph, each=-(-graph.each // self.config.run.context_parallel))

    @property
    def _graph_rows(self) -> list[int]:
        return [-(-rows // self.config.run.shards) for rows in self.graphs]

    @override
    def kept_graphs(self, room: int) -> dict[str, int]:
        word, steps = self.config.train.replay, len(self.graphs)
        if word == "auto":  # approximate: a run measures the free memory
            free = ROOM * (room - self.peak())
            steps = self._graph.within(free, self._graph_rows, size=self.config.train.rollout_rows)
        kept = 0 if word == "always" else steps
        return {
            "rows": sum(self.graphs),
            "bytes": self.graph_bytes(len(self.graphs)),
            "kept_rows": sum(self.graphs[:kept]),
            "kept_bytes": self.graph_bytes(kept),
        }

    @override
    def loading_bytes(self) -> int:
        sizes, encoders = self.trial.components, self.config.model.text_encoders
        if not (self.loads_later and encoders != "keep"):
            return sum(sizes.values())
        networks = sum(size for name, size in sizes.items() if is_network(name))
        first = sum(sizes.values()) - networks  # on the GPU before the networks load
        offloaded = sum(size for name, size in sizes.items() if name.startswith(ENCODERS) and encoders == "offload")
        return max(first, networks + offloaded)

    @override
    def embeddings(self) -> dict[str, int]:
        train, held_out = count_prompts(self.config, train=self.train_prompts, held_out=self.held_out)
        size = train * self.trial.embeddings + held_out * self.trial.held_out_embeddings
        return {"prompts": train + held_out, "bytes": size}

    @property
    @override
    def unavailable(self) -> Collection[str]:
        absent = {
            "model.vae_tiling": self.trial.rollout.decode_tiled is None,
            "model.text_encoders": self.config.model.text_encoders == "free",
        }
        return [key for key, is_absent in absent.items() if is_absent]

    def _low_precision_copies(self) -> int:
        """Return the bytes of the low-precision copies that sample drafts and finishes."""
        words = low_precision_copies.of_copies(self.config)
        networks = self.trial.shapes.values()
        return sum(low_precision_copies.size(each, self._linear_width, word) for each in networks for word in words)

    def _copied_layer(self) -> int:
        """Return the bytes that the largest layer of a copy in nf4 needs to dequantise its weights in a call."""
        if "nf4" not in low_precision_copies.of_copies(self.config):
            return 0
        return quantisation.dequantised_bytes(self.trial.shapes.values(), self._linear_width)

    def _products(self) -> int:
        """Return the bytes that a row's largest product of eight bits needs: sums in int32, and their float32 values."""
        words = low_precision_copies.of_copies(self.config)
        return 8 * self.trial.rollout.widest if words.keys() & set(low_precision_copies.EIGHT_BITS) else 0

    @property
    def _linear_width(self) -> int:
        return self.trial.width if self.config.model.lora else 4  # learning weights are float32

    def _decode(self, sampling: Sampling) -> Peaks:
        tiled = sampling.decode_tiled if self.config.model.vae_tiling else None
        return tiled or sampling.decode


def fit(config: Config, gpu_bytes: int) -> dict[str, Any]:
    """Return whether a run fits a GPU, and what to set if not (`check_fit`); raise InputError if the run cannot start."""
    with budget_of(config) as budget:
        return check_fit(budget, gpu_bytes)


@contextmanager
def budget_of(config: Config, of_node: int = OF_NODE) -> Iterator[FlowBudget]:
    """Yield the memory of a run on machines with `of_node` GPUs, valid inside the context only; raise as `fit` does."""
    train_prompts = stored.train_prompts(config)
    held_out = prompts.load_split(config.prompts, "eval")[: config.eval.prompts]
    longest = max(train_prompts, key=lambda p: len(p.text))
    call = {**embedded.default_call(config.model.path), **config.model.call}
    with meta_pipeline.configs(config.model.path) as folder, few_objects():
        local = with_setting(with_setting(config, "model.path", folder), "model.call", call)
        row = Row(longest.text, 0, longest.columns)
        measure = measure_once(local, lambda other: trial(other, folder, row))
        steps = call_and_branches(local, columns=longest.columns)[0]["num_inference_steps"]
        states, group = count_kept(config, steps)
        roots, most = config.algorithm.roots(config.train.group_size), second_stage.most_roots(config)
        states, group = states * most // roots, max(group, group * (most - roots) // roots)
        graphs = None if config.train.replay == "always" else most_graphs(local, steps)
        yield FlowBudget(
            config=config,
            trial=measure(config),
            states=states,
            graphs=graphs.graph_rows if graphs else (),
            samples=config.train.groups * group,
            group=group,
            train_prompts=len(train_prompts),
            held_out=len(held_out),
            loads_later=load.loads_later(folder),
            measure=measure,
            of_node=of_node,
        )
