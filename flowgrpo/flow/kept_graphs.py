"""Whether the rollouts of a run keep graphs for the first update: where there is room, until memory runs out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from flowgrpo.flow.encoding import longest_and_shortest, rows_of
from flowgrpo.flow.graphs import ROOM, hindrance, measured
from flowgrpo.flow.predicted import most_graphs
from flowgrpo.training.layout import of_machine
from flowgrpo.training.loop import Loop
from flowgrpo.training.probing import free_bytes
from flowgrpo.training.random_states import random_state_kept
from rewards.memory import is_out_of_memory


class KeptGraphs:
    """Whether the rollouts of a run keep graphs.

    Attributes:
        parts: of an iteration's update, whose graphs they keep: the first or none, on all processes alike.
        growing: whether the trees of a rollout have begun to grow; before, drafts have no graphs.

    Args:
        config: of the run.
    """

    def __init__(self, config: Any):
        self.parts: Sequence[int] = ()
        self.growing = False
        self._insists, self._gave_up = config.train.replay == "never", False

    def of(self, config: Any) -> Sequence[int]:
        """The parts with the sizes of calls that hold now, which may hinder it."""
        return () if self.parts and hindrance(config) else self.parts

    def state(self) -> dict[str, bool] | None:
        """Whether there was no room, as JSON, for a resume; None where nothing is to be remembered."""
        return {"graphs_given_up": True} if self._gave_up else None

    def restore(self, state: dict[str, bool] | None) -> None:
        """Take over what `state` returned when a checkpoint was written."""
        self._gave_up = bool(state and state["graphs_given_up"])

    def give_up(self, config: Any) -> str | None:
        """Let rollouts keep none any more, and say so; None where this one keeps none, or is to whatever it takes."""
        if not (self.growing and self.of(config)) or self._insists:
            return None
        return self.stop()

    def stop(self) -> str:
        """Let rollouts keep none any more, and say so."""
        self.parts, self._gave_up = (), True
        return "the update calls the model anew (train.replay)"

    def decide(self, trainer: Loop) -> None:
        """See whether there is room, and tell the user; not once a run has found that there is none."""
        config, policy = trainer.config, trainer.policy
        if self._insists:
            self.parts = (0,)
            return
        asks = config.keeps_graphs and not self._gave_up
        cost = most_graphs(config, len(policy.sigmas) - 1, trainer.done) if asks else None
        if cost is None or not cost.graphs:
            return
        rows, size = -(-cost.graphs // trainer.share.count), config.train.rollout_rows
        (row,) = rows_of(longest_and_shortest(trainer.train_prompts)[:1])
        try:
            with random_state_kept():
                kept, call = measured(policy, policy.start([row]), row, size=size)
            need = kept.of(rows, times=cost.graph_times, size=size)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            call, need = 0, math.inf  # an update will say so, in its own phase
        device, processes = trainer.accelerator.device, of_machine(trainer.accelerator.num_processes)
        call = 0 if config.train.found else call  # what was tried of found sizes is to come
        free = max(free_bytes(device, processes) - trainer.batch_sizes.to_come() - call, 0)
        fits = need <= ROOM * free
        alone = float(trainer.exchange.sum(torch.tensor(float(not fits)))) == 0
        taken = "more memory than a call has" if math.isinf(need) else f"{need / 2**30:.2f} GiB"
        there = f"{free / 2**30:.2f} GiB that are free"
        if fits and alone:
            self.parts = (0,)
            said = f"rollouts keep the graphs of {rows:,} rows for the first update, {taken} of {there}"
        else:
            self._gave_up = True
            share = (
                "on another process more than half of what is free" if fits else f"more than {ROOM:.0%} of the {there}"
            )
            graphs = f"graphs of {rows:,} rows would take {taken}, {share}"
            said = f"the first update of an iteration calls the model anew; {graphs}"
        trainer.report.say(f"train.replay: {said}")
