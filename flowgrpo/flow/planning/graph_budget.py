"""The decision whether rollouts keep their autograd graphs for the first update: if they fit, until memory runs out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import cast

import torch
from typing_extensions import override

from flowgrpo.flow.config import Config
from flowgrpo.flow.planning.iteration_forecast import most_graphs
from flowgrpo.flow.rollouts.prompt_encoding import build_rows, longest_and_shortest
from flowgrpo.flow.updates.rollout_graphs import ROOM, measure_graph
from flowgrpo.training.distributed.gpu_layout import of_machine
from flowgrpo.training.fitting.batch_probing import free_bytes
from flowgrpo.training.run.random_states import preserve_random_state
from flowgrpo.training.state import RunState
from flowgrpo.training.wing import KeptGraphs
from rewards.memory import is_out_of_memory


class RolloutGraphs(KeptGraphs):
    """The decision whether the rollouts of a run keep their autograd graphs (`flow.updates.rollout_graphs`).

    Attributes:
        parts: numbers of the minibatches whose graphs rollouts keep: (0,) or ().
        growing: whether a rollout is growing its trees now; False during drafts, which keep no graphs.
    """

    def __init__(self, run: RunState):
        self.parts: Sequence[int] = ()
        self.growing = False
        self._run, self._gave_up = run, False

    @property
    def _config(self) -> Config:
        return cast("Config", self._run.config)

    @property
    def held(self) -> Sequence[int]:
        """Return `parts`, or () if the current batch sizes prevent reuse of graphs (`Config.graph_hindrance`)."""
        return () if self.parts and self._config.graph_hindrance else self.parts

    @property
    def _insists(self) -> bool:
        return self._config.train.replay == "never"

    @override
    def state(self) -> dict[str, bool] | None:
        """Return {"graphs_given_up": True} for a checkpoint if graphs were given up, else None."""
        return {"graphs_given_up": True} if self._gave_up else None

    @override
    def restore(self, state: dict[str, bool] | None) -> None:
        """Restore the result of `state`."""
        self._gave_up = bool(state and state["graphs_given_up"])

    @property
    @override
    def there(self) -> bool:
        return self.growing and bool(self.held)

    @override
    def give_up(self) -> str | None:
        if not self.there or self._insists:
            return None
        self.parts, self._gave_up = (), True
        return "the update calls the model anew (train.replay)"

    def decide(self, to_come: Callable[[int], int]) -> None:
        """Measure whether graphs fit into memory, set `parts`, and report the decision.

        With `train.replay: never` graphs are always kept. A run that has given them up does not measure again.
        `to_come` returns the bytes that the run will still allocate, given those of one call; see `BatchSizes.to_come`.
        """
        run, config, policy = self._run, self._config, self._run.policy
        if self._insists:
            self.parts = (0,)
            return
        may_keep = config.keeps_graphs and not self._gave_up
        cost = most_graphs(config, len(policy.sigmas) - 1, run.done) if may_keep else None
        if cost is None or not cost.graphs:
            return
        rows, size = -(-cost.graphs // run.shard.count), cost.call_rows
        (row,) = build_rows(longest_and_shortest(run.train_prompts)[:1])
        try:
            with preserve_random_state():
                kept, call = measure_graph(policy, policy.start([row]), row, size=size)
            need = kept.of(rows, times=cost.graph_times, size=size)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            call, need = 0, math.inf  # an update will report this in its own phase
        device, processes = run.accelerator.device, of_machine(run.accelerator.num_processes)
        free = max(free_bytes(device, processes) - to_come(call), 0)
        fits = need <= ROOM * free
        short = float(run.collectives.sum(torch.tensor(float(not fits)))) > 0
        need_text, free_text = f"{need / 2**30:.2f} GiB", f"{free / 2**30:.2f} GiB that are free"
        if not short:
            self.parts = (0,)
            decision = f"rollouts keep the graphs of {rows:,} rows for the first update, {need_text} of {free_text}"
        else:
            self._gave_up = True
            if math.isinf(need):
                why = "one call that keeps its graph runs out of memory"
            elif fits:
                why = f"on another process graphs of {rows:,} rows would take more than {ROOM:.0%} of what is free"
            else:
                why = f"graphs of {rows:,} rows would take {need_text}, more than {ROOM:.0%} of the {free_text}"
            decision = f"the first update of an iteration calls the model anew; {why}"
        run.report.say(f"train.replay: {decision}")
