"""The decision how many trained steps of a rollout keep their autograd graphs for the first update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

from typing_extensions import override

from flowgrpo.errors import InputError
from flowgrpo.flow.config import Config
from flowgrpo.flow.pipeline.networks.captured_calls import CapturedCalls
from flowgrpo.flow.planning.iteration_forecast import Cost, most_graphs
from flowgrpo.flow.rollouts.prompt_encoding import build_rows, longest_and_shortest
from flowgrpo.flow.updates.rollout_graphs import ADDED, ROOM, Kept, in_host_memory, measure_graph
from flowgrpo.training.distributed.gpu_layout import of_machine
from flowgrpo.training.fitting.batch_probing import free_bytes, used_bytes
from flowgrpo.training.run.random_states import preserve_random_state
from flowgrpo.training.state import RunState
from flowgrpo.training.wing import KeptGraphs
from rewards.memory import is_out_of_memory
from samplers.growth import trained_steps
from samplers.trees import Plan


class RolloutGraphs(KeptGraphs):
    """The decision how many steps of a run's rollouts keep their autograd graphs (`flow.updates.rollout_graphs`).

    Attributes:
        steps: number of trained steps, from the first, whose graphs rollouts keep.
        growing: whether a rollout is growing its trees now; False during drafts, which keep no graphs.
        captured: the CUDA graphs of rollouts' calls; None without `model.cuda_graphs`.
    """

    def __init__(self, run: RunState):
        self.steps, self.growing = 0, False
        self.captured: CapturedCalls | None = None
        self._run = run
        self._decided: int | None = None  # the most steps that the run may keep, once it has measured them

    @property
    def _config(self) -> Config:
        return cast("Config", self._run.config)

    @property
    def held(self) -> int:
        """Return `steps`, or 0 if the current batch sizes prevent reuse of graphs (`Config.graph_hindrance`)."""
        return 0 if self.steps and self._config.graph_hindrance else self.steps

    def addresses(self, plan: Plan) -> set[tuple[int, float]]:
        """Return the (part, sigma) of the evaluations that keep their graphs in a rollout of `plan`."""
        sigmas = dict.fromkeys(sigma for _, sigma, _ in trained_steps(plan, self._run.policy.sigmas))
        return {(0, sigma) for sigma in [*sigmas][: self.held]}

    @property
    def _insists(self) -> bool:
        return self._config.train.replay == "never"

    @override
    def state(self) -> dict[str, int] | None:
        """Return {"graph_steps": n} for a checkpoint if the run has decided how many it keeps, else None."""
        return None if self._decided is None else {"graph_steps": self._decided}

    @override
    def restore(self, state: dict[str, int] | None) -> None:
        """Restore the result of `state`. Earlier versions only recorded that graphs were given up."""
        self._decided = None if state is None else state.get("graph_steps", 0)

    @property
    @override
    def there(self) -> bool:
        return self.growing and self.held > 0

    @override
    def give_up(self) -> str | None:
        if self.there and not self._insists:
            self.steps = self._decided = 0
            return "the update calls the model anew (train.replay)"
        if self.captured is not None and self.captured.give_up("memory ran out"):
            return "the memory of model.cuda_graphs is freed"
        return None

    def capture(self) -> None:
        """Let rollouts' calls be CUDA graphs if `model.cuda_graphs` asks for it.

        Raises InputError if a network is compiled as a whole, or the pipeline pins a part of the state: then equal calls
        have unequal results.
        """
        if not self._config.model.cuda_graphs:
            return
        if self._run.policy.pins:
            raise InputError("model.cuda_graphs: this pipeline pins a part of what it samples; set it to false")
        self.captured = CapturedCalls(self._run.policy.modules.values())

    def decide(self, to_come: Callable[[int], int]) -> None:
        """Measure the graphs of one row, set `steps` to as many as there is room for, and report the decision.

        With `train.replay: never` all graphs are kept. A resumed run keeps as many as before, fewer if they do not fit into
        the free memory. `to_come` returns the bytes that the run will still allocate, given those of one call; see
        `BatchSizes.to_come`.
        """
        run, config, policy = self._run, self._config, self._run.policy
        if self._insists:
            self.steps = len(policy.sigmas) - 1
            return
        may_keep = config.keeps_graphs and self._decided != 0
        cost = most_graphs(config, len(policy.sigmas) - 1, run.done) if may_keep else None
        if cost is None or not cost.graphs:
            return
        rows, size = [-(-count // run.shard.count) for count in cost.graph_rows], cost.call_rows
        (row,) = build_rows(longest_and_shortest(run.train_prompts)[:1])
        kept, fitting, limit = Kept(once=0, each=0), 0, ""
        try:
            with preserve_random_state():
                kept, call = measure_graph(policy, policy.start([row]), row, size=size)
            if run.accelerator.device.type != "cuda":
                kept = in_host_memory(kept, adapters=config.model.lora is not None)
            room, limit = self._room(kept.of([size], size=size), call, to_come)
            fitting = kept.within(room, rows, size=size)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):  # an update will report this in its own phase
                raise
        before = len(rows) if self._decided is None else self._decided
        self.steps = min([before, *run.collectives.gather([fitting])])
        if self.steps == before < len(rows):
            limit = "the run kept before it was resumed"
        elif self.steps < fitting:
            limit = "another process has room for"
        self._decided = self.steps
        run.report.say(f"train.replay: {_tell(cost, kept, rows, steps=self.steps, limit=limit)}")

    def _room(self, one: int, call: int, to_come: Callable[[int], int]) -> tuple[float, str]:
        """Return the bytes that graphs may take on this process, and a phrase about where the limit comes from.

        Free memory of a GPU has no other user, that of a host may have. There graphs may add `ADDED` of what the process
        takes without them, beside the graph of one call, which an update makes anyway. `one` are the bytes of that graph,
        `call` those of the call itself. The run's first decision alone looks at what the process takes, for a process that
        resumes may take more or less.
        """
        device, processes = self._run.accelerator.device, of_machine(self._run.accelerator.num_processes)
        free = max(free_bytes(device, processes) - to_come(call), 0)
        rooms = [(ROOM * free, f"{ROOM:.0%} of the {_gib(free)} that are free")]
        if device.type != "cuda" and self._decided is None:
            without = used_bytes(device) + to_come(call + one)
            limit = f"what keeps the process below {1 + ADDED:g} times the {_gib(without)} that it takes without graphs"
            rooms.append((one + ADDED * without, limit))
        return min(rooms)


def _tell(cost: Cost, kept: Kept, rows: Sequence[int], *, steps: int, limit: str) -> str:
    """Return a sentence about the graphs of `steps` of the trained steps, which have `rows` rows on this process."""
    size, every = cost.call_rows, f"{len(rows)} trained step{'s' * (len(rows) > 1)}"
    which = f"all {every}" if steps == len(rows) else f"{_first(steps)} of {every}"
    taken = f"{sum(rows[:steps]):,} rows in {_gib(kept.of(rows[:steps], size=size))}"
    spared = f"about {cost.spared(steps):.0%} of an iteration's work"
    keeps = f"rollouts keep the graphs of {which} for the first update, {taken}, which spare {spared}"
    if steps == len(rows):
        return keeps
    more = f"graphs of {_first(steps + 1)} would take {_gib(kept.of(rows[: steps + 1], size=size))}, more than {limit}"
    if not limit:
        more = "one call that keeps its graph runs out of memory"
    return f"{keeps}; {more}" if steps else f"the first update of an iteration calls the model anew; {more}"


def _first(steps: int) -> str:
    return f"the first {steps}" if steps > 1 else "the first"


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"
