"""Batch sizes that are `auto` in the config (`train.micro_batch`, `train.rollout_batch`), found by probing.

They are probed before the first rollout of a new run and written to `batches.json` in its folder. A resumed run takes
the sizes of its checkpoint's iteration; on another machine it tests whether they fit. If a call runs out of memory
later, its size is halved (`training.out_of_memory_retry`).

Batch sizes change samples by rounding only, since noise does not depend on them. A run whose config states
the found sizes gives exactly the same results.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from accelerate import Accelerator

from flowgrpo.data import tables
from flowgrpo.errors import InputError
from flowgrpo.schema.sections import AUTO, RunConfig
from flowgrpo.training.distributed.dtensors import local
from flowgrpo.training.distributed.gpu_layout import of_machine
from flowgrpo.training.fitting import batch_probing
from flowgrpo.training.fitting.batch_probing import Memory, Prober, Timed, Tried
from flowgrpo.training.run import phases
from flowgrpo.training.run.random_states import preserve_random_state
from flowgrpo.training.run.run_folder import replace_text
from flowgrpo.training.state import RunState
from flowgrpo.training.weights.optimizers import MESSAGE, OPTIMIZERS

FILE = "batches.json"
UPDATE, ROLLOUT = "micro_batch", "rollout_batch"


@dataclass(frozen=True)
class ProbeCalls:
    """Model calls that probe batch sizes on the longest prompt: those of a rollout and those of an update."""

    rollout: Sequence[Timed]
    update: Sequence[Timed]


class BatchSizes:
    """The probed batch sizes of a run. `prepare` puts them into the run's config.

    `probe_calls` returns the model calls that probe sizes. `copies_to_come` returns the bytes of low-precision copies of
    networks that rollouts will still allocate.
    """

    def __init__(self, run: RunState, probe_calls: Callable[[], ProbeCalls], copies_to_come: Callable[[], int]):
        self._run, self._asked = run, run.config.train.found
        self._probe_calls, self._copies_to_come = probe_calls, copies_to_come
        self._tried: dict[str, list[dict[str, Any]]] = {}
        self._held: list[dict[str, Any]] = []  # sizes, each with the step from which they are used, ascending
        self._alone = run.accelerator.num_processes == 1

    def prepare(self) -> None:
        """Put the sizes that a resumed run recorded, or else newly probed ones, into the config. A collective call.

        Raises InputError if not even one row fits, or if the record of a resumed run cannot be read.
        """
        if not self._asked:
            return
        run, machines = self._run, sorted({tuple(each) for each in self._run.everyone(_machine(self._run.accelerator))})
        written = run.on_main(lambda: read(run.folder))
        if written is not None:
            self._tried = written["tried"]
            self._held = [each for each in written["held"] if each["step"] <= run.done]
            if len(self._held) < len(written["held"]):
                self._write(None)  # drop the sizes of later iterations
        held = self._held[-1] if self._held else {}
        known = {key: held[key] for key in self._asked if key in held}
        if written is not None and known:
            self.use(known)
            if machines != [tuple(each) for each in written["machines"]]:
                self._fit_another(known, machines)
        new = [key for key in self._asked if key not in known]
        if not new:
            return
        with phases.phase("probing"):
            started, probed = phases.clock(), self._found(new)
        recorded = {key: getattr(run.config.train, key) for key in known}
        self.hold(run.done, {**recorded, **probed}, "found", machines)
        sizes = ", ".join(f"train.{key} {rows}" for key, rows in probed.items())
        run.report.say(f"found {sizes} in {phases.clock() - started:.0f} s")

    def to_come(self, call: int) -> int:
        """Return the bytes that a run will still allocate: moments, gradients, copies of networks, and one model call.

        `call` are the bytes of one call. For an update, a larger value that probing measured replaces it.
        """
        train = self._run.config.train
        tried = [
            each.get("call_bytes", each["peak_bytes"])
            for key in self._asked
            for each in self._tried.get(key, ())
            if each["rows"] == getattr(train, key)
        ]
        update = self._still_to_come(UPDATE) + max([call, *tried])
        return max(self._still_to_come(ROLLOUT) + call, update)

    def _found(self, keys: Sequence[str]) -> dict[str, int]:
        run, train, sizes = self._run, self._run.config.train, {}
        # Computed from the trainers on every process: generators and evaluators must try the same sizes.
        shards = run.roles.trainers // run.config.run.context_parallel
        most = train.part_rows // shards
        for key in keys:
            taken = batch_probing.used_bytes(self._run.accelerator.device)
            with self._probing(key) as (prober, timed):
                tried = prober.sizes(timed, max(1, most))
            self._tried[key] = [_as_json(each, taken) for each in tried]
            sizes[key] = batch_probing.best(tried, f"train.{key}").rows
        return sizes

    def _fit_another(self, sizes: dict[str, int], machines: list[tuple[str, int]]) -> None:
        """Halve the sizes until they fit this machine, on which they were not found."""
        run, fitting = self._run, {}
        with phases.phase("probing"):
            for key, rows in sizes.items():
                with self._probing(key) as (prober, timed):
                    fitting[key] = prober.largest(timed, rows)
        self.hold(run.done, fitting, "another machine", machines)
        for key, rows in fitting.items():
            if rows < sizes[key]:
                here = ", ".join(f"{name} of {size / 2**30:.0f} GiB" for name, size in machines)
                sentence = f"train.{key} was found on another machine; {sizes[key]} do not fit here ({here})"
                run.report.warn(f"{sentence}, it is {rows} from here on")

    @contextmanager
    def _probing(self, key: str) -> Iterator[tuple[Prober, Sequence[Timed]]]:
        """Yield a prober, and the calls that probe the size of `key`; undo their side effects at exit.

        With `rollout_batch: null`, `micro_batch` is the size of both kinds of calls.
        """
        run, evaluations = self._run, self._run.evaluations
        memory = Memory(run.accelerator.device, self._still_to_come(key), of_machine(run.accelerator.num_processes))
        prober = Prober(memory=memory, everyone=run.everyone, clear=self.drop_gradients, alone=self._is_alone())
        try:
            with preserve_random_state():
                calls = self._probe_calls()
                if key == ROLLOUT:
                    yield prober, calls.rollout
                else:
                    both = run.config.train.rollout_batch is None
                    yield prober, [*(calls.rollout if both else ()), *calls.update]
        finally:
            run.evaluations = evaluations
            memory.give_back()
            memory.begin()

    def _is_alone(self) -> bool:
        run = self._run.config.run
        return self._alone or (run.sharding == "none" and run.context_parallel == 1)

    @property
    def sizes(self) -> dict[str, int]:
        """The probed sizes that this process uses now, by key; keys that are not probed yet are left out."""
        sizes = {key: getattr(self._run.config.train, key) for key in self._asked}
        return {key: rows for key, rows in sizes.items() if rows != AUTO}

    def halve(self, key: str) -> dict[str, int] | None:
        """Return half the size of `key`, under the config key that sets it; None if that size was not probed or is 1."""
        train = self._run.config.train
        asked = UPDATE if key == ROLLOUT and train.rollout_batch is None else key
        rows = getattr(train, asked)
        return {asked: rows // 2} if asked in self._asked and rows > 1 else None

    def hold(self, step: int, sizes: dict[str, int], why: str, machines: list[tuple[str, int]] | None = None) -> None:
        """Use sizes from `step` on, and record them in the run's folder. `why` is the reason in the record."""
        self.use(sizes)
        self._held.append({"step": step, **self.sizes, "why": why})
        self._write(machines)

    def _write(self, machines: list[tuple[str, int]] | None) -> None:
        """Write the record to the run's folder; `machines` None keeps the recorded machines."""
        run = self._run
        if not run.accelerator.is_main_process:
            return
        written = read(run.folder) or {}
        place = {"machines": written.get("machines") if machines is None else machines}
        content = {"asked": dict.fromkeys(self._asked, "auto"), **place, "held": self._held, "tried": self._tried}
        replace_text(run.folder / FILE, json.dumps(content, indent=1) + "\n")

    def use(self, sizes: dict[str, int]) -> None:
        """Use sizes on this process."""
        self._run.config = with_sizes(self._run.config, sizes)

    def drop_gradients(self) -> None:
        """Drop the gradients of all trained weights."""
        for p in self._run.weights.parameters:
            p.grad = None

    def _still_to_come(self, key: str) -> int:
        """Return the bytes yet to be allocated outside of calls of `key`: moments, network copies, gradients, their sums."""
        run = self._run
        count = sum(local(p).numel() for p in run.weights.parameters)
        moments = 0 if run.optimizer.state else OPTIMIZERS[run.config.train.optimizer.name].bytes_per_number
        sums = 0 if self._alone else 2 * min(4 * count, MESSAGE)
        return int(count * (moments + 4 * (key == ROLLOUT))) + sums + self._copies_to_come()


def _machine(accelerator: Accelerator) -> tuple[str, int]:
    """Return the name and the memory in bytes of the device that a process computes on."""
    if accelerator.device.type == "cuda":
        properties = torch.cuda.get_device_properties(accelerator.device)
        return properties.name, properties.total_memory
    return accelerator.device.type, psutil.virtual_memory().total


def _as_json(tried: Tried, taken: int) -> dict[str, float]:
    call = max(0, tried.peak - taken)  # without memory allocated before, since a resumed run has allocated more
    return {"rows": tried.rows, "seconds": tried.seconds, "peak_bytes": tried.peak, "call_bytes": call}


def read(folder: Path) -> dict[str, Any] | None:
    """Return the record of probed sizes in a run's folder, or None. Raises InputError if it cannot be read or is wrong."""
    path = folder / FILE
    if not path.is_file():
        return None
    written = tables.document(path)
    try:
        machines, held, tried = (written[key] for key in ("machines", "held", "tried"))
        whole = all(isinstance(name, str) and _is_count(size) for name, size in machines) and isinstance(tried, dict)
        for each in held:
            rows = [each[key] for key in (UPDATE, ROLLOUT) if key in each]
            whole = whole and _is_count(each["step"] + 1) and bool(rows) and all(map(_is_count, rows))
    except (LookupError, TypeError, ValueError, AttributeError):
        whole = False
    if not whole:
        raise InputError(f"{path} is not a file of batch sizes that a run wrote; remove it to find them again")
    return written


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def with_sizes(config: RunConfig, sizes: dict[str, int]) -> RunConfig:
    """Return the config with the given batch sizes in place of `auto`."""
    return config.model_copy(update={"train": config.train.model_copy(update=sizes)})


def resolve_sizes(config: RunConfig, folder: Path) -> RunConfig:
    """Return the config with the sizes last recorded in a run's folder, if any, in place of `auto`. Raises as `read`."""
    written = read(folder) if config.train.found else None
    last = written["held"][-1] if written and written["held"] else {}
    return with_sizes(config, {key: last[key] for key in config.train.found if key in last})
