"""The decision of `model.compile: auto`: whether the blocks compute compiled, by calls that a new run times at its start.

Eager calls are timed first. Where all calls of the run take less than `LEAST` seconds, nothing is compiled. Else the same
calls are timed with compiled blocks, which the run takes if they save more seconds than they took to compile, since
other shapes and a resumed run compile again. The decision is in `compile.json` of the run's folder, where a resumed run
finds it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from flowgrpo.data import tables
from flowgrpo.errors import InputError
from flowgrpo.flow.config import Config
from flowgrpo.flow.planning.iteration_forecast import predict_cost
from flowgrpo.schema.imports.lazy import lazy
from flowgrpo.schema.sections import AUTO
from flowgrpo.training.fitting import batch_probing
from flowgrpo.training.fitting.batch_sizes import ProbeCalls
from flowgrpo.training.run.phases import phase
from flowgrpo.training.run.random_states import preserve_random_state
from flowgrpo.training.run.run_folder import replace_text
from flowgrpo.training.state import RunState
from flowgrpo.training.weights.optimizers import check_compiler
from rewards.memory import is_out_of_memory

if TYPE_CHECKING:
    from torch._dynamo import exc as dynamo_errors
    from torch._dynamo import utils as dynamo
else:
    dynamo, dynamo_errors = lazy("torch._dynamo.utils"), lazy("torch._dynamo.exc")  # they take a second to import

FILE, KEY = "compile.json", "model.compile"
LEAST = 60.0  # seconds; compiling the blocks of a network takes about as long
clock = time.perf_counter


@dataclass(frozen=True)
class Times:
    """Seconds of one call without a gradient and of one with its backward pass; `first`: of both when first made."""

    rollout: float
    update: float
    first: float

    def of(self, calls: tuple[float, float]) -> float:
        """Return the seconds of `calls`: a number of calls without a gradient and of calls with one."""
        return self.rollout * calls[0] + self.update * calls[1]


def decide(run: RunState, probe_calls: Callable[[], ProbeCalls]) -> None:
    """Decide for `model.compile: auto`, switch the policy's blocks, and report it; a collective call of all processes.

    Raises:
        InputError: the record in the run's folder cannot be read, or it says compiled and no compiler is here.
    """
    if cast("Config", run.config).model.compile != AUTO:
        return
    recorded = run.on_main(lambda: read(run.folder))
    trial = _Trial(run)
    if recorded is None:
        with phase("probing"):
            compiled, why = trial.choose(probe_calls)
        if run.accelerator.is_main_process:
            replace_text(run.folder / FILE, json.dumps({"compiled": compiled, "why": why}, indent=1) + "\n")
        run.report.say(f"{KEY}: {'compiled' if compiled else 'eager'}; {why}")
    elif recorded["compiled"]:
        lacking = [each for each in run.everyone(trial.lacking()) if each]
        if lacking:
            raise InputError(lacking[0])
        with phase("probing"):
            trial.compile_again(probe_calls)


def read(folder: Path) -> dict[str, Any] | None:
    """Return the decision in a run's folder: `compiled`, and `why` in words. None if there is none.

    Raises InputError if it cannot be read or is wrong.
    """
    path = folder / FILE
    if not path.is_file():
        return None
    written = tables.document(path)
    if not (isinstance(written, dict) and isinstance(written.get("compiled"), bool)):
        raise InputError(f"{path} is not what a run writes that decides on {KEY}; take it away to decide again")
    return written


class _Trial:
    """Calls of a run at its own shapes, eager and compiled. They leave evaluations, gradients and random numbers alone."""

    def __init__(self, run: RunState):
        train = run.config.train
        most = max(1, train.part_rows // run.roles.trainers)
        self._rows = min(train.rollout_rows, most), min(train.update_rows, most)
        self._run, self._blocks = run, run.policy.compiled
        self._alone = run.accelerator.num_processes == 1 or run.config.run.sharding == "none"

    def lacking(self) -> str | None:
        """Return the sentence about a compiler that is missing here, or None."""
        try:
            check_compiler(
                KEY, self._run.accelerator.device, "begin a run of another run.name with model.compile=false"
            )
        except InputError as error:
            return str(error)
        return None

    def choose(self, probe_calls: Callable[[], ProbeCalls]) -> tuple[bool, str]:
        """Return whether the run computes compiled, and why, alike on all processes; switch the blocks."""
        lacking = next((each for each in self._run.everyone(self.lacking()) if each), None)
        if lacking:
            return False, lacking.removeprefix(f"{KEY}: ").partition(", install it")[0]
        calls = self._calls()
        eager = self._agree(probe_calls)
        if isinstance(eager, str):
            return False, eager
        if eager.of(calls) < LEAST:
            return False, f"all calls of the run take {eager.of(calls):.0f} s, and compiling takes about {LEAST:.0f} s"
        self._blocks.switch(True)
        compiled = self._agree(probe_calls)
        if isinstance(compiled, str):
            self._blocks.switch(False)
            return False, compiled
        saved = eager.of(calls) - compiled.of(calls)
        took = max(0.0, compiled.first - compiled.rollout - compiled.update)
        pays = saved > took
        self._blocks.switch(pays)
        numbers = " and ".join(
            f"a call of {kind} takes {two:.3g} s in place of {one:.3g} s"
            for kind, one, two in (
                ("a rollout", eager.rollout, compiled.rollout),
                ("an update", eager.update, compiled.update),
            )
        )
        effect = "saves" if saved > 0 else "costs"
        rest = f"which {effect} {abs(saved):.0f} s of the run's {eager.of(calls):.0f} s; compiling took {took:.0f} s"
        return pays, f"{numbers}, {rest}"

    def compile_again(self, probe_calls: Callable[[], ProbeCalls]) -> None:
        """Compile as `choose` did, in the same order, so that a resumed run finds the same graphs."""
        self._blocks.switch(True)
        failed = self._agree(probe_calls)
        if isinstance(failed, str):
            raise InputError(f"{KEY}: this run began with compiled blocks, and here {failed}")

    def _calls(self) -> tuple[float, float]:
        """Return the number of the run's calls to come on one process: without a gradient, and with one."""
        run, config = self._run, cast("Config", self._run.config)
        cost = predict_cost(config, len(run.policy.sigmas) - 1, run.done)
        share = max(0, config.train.iterations - run.done) / run.roles.trainers
        without = cost.rollout + cost.update - cost.with_gradient
        return share * without / self._rows[0], share * cost.with_gradient / self._rows[1]

    def _agree(self, probe_calls: Callable[[], ProbeCalls]) -> Times | str:
        """Time the calls; return the longest times of all processes, or why a process cannot make them."""
        results = self._run.everyone(self._time(probe_calls))
        failed = next((each for each in results if isinstance(each, str)), None)
        return failed or Times(*(max(getattr(each, key) for each in results) for key in ("rollout", "update", "first")))

    def _time(self, probe_calls: Callable[[], ProbeCalls]) -> Times | str:
        run, evaluations, device = self._run, self._run.evaluations, self._run.accelerator.device
        breaks = _breaks() if self._blocks.on else set()
        try:
            with preserve_random_state():
                calls = probe_calls()
                each = list(zip((calls.rollout[0].call, calls.update[0].call), self._rows, strict=True))
                started = clock()
                for call, rows in each:
                    call(rows)
                    self._clear()
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                first = clock() - started
                rollout, update = (batch_probing.measure_seconds(call, rows, self._clear) for call, rows in each)
        except Exception as error:
            if is_out_of_memory(error) and self._alone:
                batch_probing.free(device)
                return f"calls of {' and '.join(map(str, self._rows))} rows run out of memory"
            if not self._blocks.on or not isinstance(error, dynamo_errors.TorchDynamoException):
                raise
            return f"the blocks cannot be compiled ({_first_line(getattr(error, 'inner_exception', error))})"
        finally:
            self._clear()
            run.evaluations = evaluations
        new = sorted((_breaks() if self._blocks.on else set()) - breaks)
        return f"the graph of a block breaks ({_first_line(new[0])})" if new else Times(rollout, update, first)

    def _clear(self) -> None:
        for p in self._run.weights.parameters:
            p.grad = None


def _breaks() -> set[str]:
    """Return what has broken graphs in this process so far, in PyTorch's words."""
    return set(dynamo.counters["graph_break"])


def _first_line(said: object) -> str:
    return next((line.strip().rstrip(".") for line in str(said).splitlines() if line.strip()), type(said).__name__)
