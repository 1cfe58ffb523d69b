"""Decide whether rollouts keep graphs for the first update: if there is room, until memory runs out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from accelerate import Accelerator
from typing_extensions import override

from flowgrpo.data.prompts import Prompt
from flowgrpo.flow.config import Config
from flowgrpo.flow.pipeline.policy import Policy
from flowgrpo.flow.planning.iteration_forecast import most_graphs
from flowgrpo.flow.rollouts.prompt_encoding import longest_and_shortest, rows_of
from flowgrpo.flow.updates.rollout_graphs import ROOM, measured
from flowgrpo.training.distributed.collectives import Collectives
from flowgrpo.training.distributed.data_share import DataShard
from flowgrpo.training.distributed.gpu_layout import of_machine
from flowgrpo.training.fitting.batch_probing import free_bytes
from flowgrpo.training.fitting.batch_sizes import BatchSizes
from flowgrpo.training.fitting.oom_retry import NoGraphs
from flowgrpo.training.reports.report import Report
from flowgrpo.training.run.random_states import random_state_kept
from rewards.memory import is_out_of_memory


class Training(Protocol):
    """The part of a `Trainer` that `KeptGraphs` uses."""

    config: Config
    policy: Policy
    done: int
    share: DataShard
    train_prompts: Sequence[Prompt]
    accelerator: Accelerator
    collectives: Collectives
    report: Report
    batch_sizes: BatchSizes


class KeptGraphs(NoGraphs):
    """The graphs that a run's rollouts keep.

    Attributes:
        parts: of an iteration's update whose graphs are kept: the first or none. All processes agree when an iteration
            begins; one that gives graphs up drops them at once, the others at its end.
        growing: whether the trees of a rollout grow; drafts before have no graphs.
    """

    def __init__(self, trainer: Training):
        self.parts: Sequence[int] = ()
        self.growing = False
        self._trainer, self._gave_up = trainer, False

    @property
    def held(self) -> Sequence[int]:
        """The parts under the current call sizes, which may rule graphs out."""
        return () if self.parts and self._trainer.config.graph_hindrance else self.parts

    @property
    def _insists(self) -> bool:
        return self._trainer.config.train.replay == "never"

    def state(self) -> dict[str, bool] | None:
        """Return the state for a checkpoint: that graphs were given up; None otherwise."""
        return {"graphs_given_up": True} if self._gave_up else None

    def restore(self, state: dict[str, bool] | None) -> None:
        """Restore what `state` returned."""
        self._gave_up = bool(state and state["graphs_given_up"])

    @property
    @override
    def there(self) -> bool:
        return self.growing and bool(self.held)

    @override
    def give_up(self) -> str | None:
        if not self.there or self._insists:
            return None
        self.stop()
        return "the update calls the model anew (train.replay)"

    @override
    def stop(self) -> None:
        self.parts, self._gave_up = (), True

    def decide(self) -> None:
        """Measure whether there is room, and report it; a run that gave graphs up does not ask again."""
        trainer, config, policy = self._trainer, self._trainer.config, self._trainer.policy
        if self._insists:
            self.parts = (0,)
            return
        asks = config.keeps_graphs and not self._gave_up
        cost = most_graphs(config, len(policy.sigmas) - 1, trainer.done) if asks else None
        if cost is None or not cost.graphs:
            return
        rows, size = -(-cost.graphs // trainer.share.count), cost.call_rows
        (row,) = rows_of(longest_and_shortest(trainer.train_prompts)[:1])
        try:
            with random_state_kept():
                kept, call = measured(policy, policy.start([row]), row, size=size)
            need = kept.of(rows, times=cost.graph_times, size=size)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            call, need = 0, math.inf  # the update will fail by itself, in its own phase
        device, processes = trainer.accelerator.device, of_machine(trainer.accelerator.num_processes)
        free = max(free_bytes(device, processes) - trainer.batch_sizes.to_come(call), 0)
        fits = need <= ROOM * free
        short = float(trainer.collectives.sum(torch.tensor(float(not fits)))) > 0
        taken, there = f"{need / 2**30:.2f} GiB", f"{free / 2**30:.2f} GiB that are free"
        if not short:
            self.parts = (0,)
            said = f"rollouts keep the graphs of {rows:,} rows for the first update, {taken} of {there}"
        else:
            self._gave_up = True
            if math.isinf(need):
                why = "one call that keeps its graph runs out of memory"
            elif fits:
                why = f"on another process graphs of {rows:,} rows would take more than {ROOM:.0%} of what is free"
            else:
                why = f"graphs of {rows:,} rows would take {taken}, more than {ROOM:.0%} of the {there}"
            said = f"the first update of an iteration calls the model anew; {why}"
        trainer.report.say(f"train.replay: {said}")
