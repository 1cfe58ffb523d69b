"""The numbers of `train.micro_batch: auto` and `train.rollout_batch: auto`: found once, kept with a run, halved if need be.

They are found before the first rollout of a fresh run (`training.fitting.batch_probing`), and kept with what was measured
in `batches.json` of its folder. A resume takes what held when its checkpoint was written, without a probe; on another
machine it tries whether these fit. Noise is addressed, so that sizes change samples by rounding alone, and a run with the
found sizes written out has the very same numbers. A call that runs out of memory all the same halves them, see
`training.oom_retry`.
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
from accelerate.utils import gather_object

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
    """The calls that sizes are tried with, on the longest prompt: those of a rollout, and those of an update."""

    rollout: Sequence[Timed]
    update: Sequence[Timed]


class BatchSizes:
    """The found sizes of a run, which stand in its configuration once `prepare` has been called.

    Args:
        probe_calls: returns the calls that sizes are tried with.
        copies_to_come: returns the bytes of copies of the networks that rollouts will make.
    """

    def __init__(self, run: RunState, probe_calls: Callable[[], ProbeCalls], copies_to_come: Callable[[], int]):
        self._run, self._asked = run, run.config.train.found
        self._probe_calls, self._copies_to_come = probe_calls, copies_to_come
        self._tried: dict[str, list[dict[str, Any]]] = {}
        self._held: list[dict[str, Any]] = []  # from which step on which sizes hold, ascending
        self._alone = run.accelerator.num_processes == 1

    def prepare(self) -> None:
        """Put the sizes into the configuration: those that a resumed run has, or those that are found now.

        All processes do so together.

        Raises:
            InputError: not even one row fits, or the file of a resumed run cannot be read.
        """
        if not self._asked:
            return
        run, machines = self._run, sorted({tuple(each) for each in self._everyone(_machine(self._run.accelerator))})
        written = self._read()
        if written is not None:
            self._tried = written["tried"]
            self._held = [each for each in written["held"] if each["step"] <= run.done]
            if len(self._held) < len(written["held"]):
                self._write(None)  # what came after is forgotten
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
            started, found = phases.clock(), self._found(new)
        kept = {key: getattr(run.config.train, key) for key in known}
        self.hold(run.done, {**kept, **found}, "found", machines)
        sizes = ", ".join(f"train.{key} {rows}" for key, rows in found.items())
        run.report.say(f"found {sizes} in {phases.clock() - started:.0f} s")

    def to_come(self, call: int) -> int:
        """Bytes that a run will have beside what it has now: moments, gradients, copies, and in calls.

        Args:
            call: that a call takes; the ones of found sizes, which were tried, may have taken more.
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

    def _read(self) -> dict[str, Any] | None:
        """What the main process reads in the run's folder, on every process: disks may differ.

        Raises:
            InputError: it cannot be read, on all of them.
        """
        own: Any = None
        if self._run.accelerator.is_main_process:
            try:
                own = read(self._run.folder)
            except InputError as error:
                own = error
        written = self._everyone(own)[0]
        if isinstance(written, InputError):
            raise written
        return written

    def _found(self, keys: Sequence[str]) -> dict[str, int]:
        """The sizes of some keys that ask for one."""
        run, train, found = self._run, self._run.config.train, {}
        # The same on processes that do not train: all try alike.
        hands = run.roles.trainers // run.config.run.context_parallel
        most = train.part_rows // hands
        for key in keys:
            taken = batch_probing.taken_bytes(self._run.accelerator.device)
            with self._trying(key) as (prober, timed):
                tried = prober.sizes(timed, max(1, most))
            self._tried[key] = [_as_json(each, taken) for each in tried]
            found[key] = batch_probing.best(tried, f"train.{key}").rows
        return found

    def _fit_another(self, found: dict[str, int], machines: list[tuple[str, int]]) -> None:
        """Halve the sizes until they fit a machine that they were not found on."""
        run, fitting = self._run, {}
        with phases.phase("probing"):
            for key, rows in found.items():
                with self._trying(key) as (prober, timed):
                    fitting[key] = prober.largest(timed, rows)
        self.hold(run.done, fitting, "another machine", machines)
        for key, rows in fitting.items():
            if rows < found[key]:
                here = ", ".join(f"{name} of {size / 2**30:.0f} GiB" for name, size in machines)
                sentence = f"train.{key} was found on another machine; {found[key]} do not fit here ({here})"
                run.report.warn(f"{sentence}, it is {rows} from here on")

    @contextmanager
    def _trying(self, key: str) -> Iterator[tuple[Prober, Sequence[Timed]]]:
        """A context in which sizes of a key are tried by these calls, and that leaves no trace of them.

        With `rollout_batch: null` the calls of both kinds have one size.
        """
        run, evaluations = self._run, self._run.evaluations
        memory = Memory(run.accelerator.device, self._still_to_come(key), of_machine(run.accelerator.num_processes))
        prober = Prober(memory=memory, everyone=self._everyone, clear=self.drop_gradients, alone=self._is_alone())
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
        """Whether a call of the model is of one process, and not made together with others."""
        run = self._run.config.run
        return self._alone or (run.sharding == "none" and run.context_parallel == 1)

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes that this process uses now, of those that were asked for and have been found."""
        sizes = {key: getattr(self._run.config.train, key) for key in self._asked}
        return {key: rows for key, rows in sizes.items() if rows != AUTO}

    def halved(self, key: str) -> dict[str, int] | None:
        """The sizes of a second attempt; None where there is none."""
        train = self._run.config.train
        asked = UPDATE if key == ROLLOUT and train.rollout_batch is None else key
        rows = getattr(train, asked)
        return {asked: rows // 2} if asked in self._asked and rows > 1 else None

    def hold(self, step: int, sizes: dict[str, int], why: str, machines: list[tuple[str, int]] | None = None) -> None:
        """Use sizes from a step on, and write that to the run's folder."""
        self.use(sizes)
        self._held.append({"step": step, **self.sizes, "why": why})
        self._write(machines)

    def _write(self, machines: list[tuple[str, int]] | None) -> None:
        """Write what holds to the run's folder, on machines that are written there already or these."""
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
        """Free the gradients of a call."""
        for p in self._run.weights.parameters:
            p.grad = None

    def _still_to_come(self, key: str) -> int:
        """Return bytes beside calls that are not taken yet: moments, copies, sums of gradients; in rollouts gradients."""
        run = self._run
        count = sum(local(p).numel() for p in run.weights.parameters)
        moments = 0 if run.optimizer.state else OPTIMIZERS[run.config.train.optimizer.name].bytes_per_number
        sums = 0 if self._alone else 2 * min(4 * count, MESSAGE)
        return int(count * (moments + 4 * (key == ROLLOUT))) + sums + self._copies_to_come()

    def _everyone(self, told: Any) -> list[Any]:
        """What every process of the run tells, whatever its role; all ask together."""
        self._run.weights.lockstep.join()
        return gather_object([told])


def _machine(accelerator: Accelerator) -> tuple[str, int]:
    """The name and the bytes of what a process computes on."""
    if accelerator.device.type == "cuda":
        properties = torch.cuda.get_device_properties(accelerator.device)
        return properties.name, properties.total_memory
    return accelerator.device.type, psutil.virtual_memory().total


def _as_json(tried: Tried, taken: int) -> dict[str, float]:
    call = max(0, tried.peak - taken)  # beside what was there, of which a resume has more
    return {"rows": tried.rows, "seconds": tried.seconds, "peak_bytes": tried.peak, "call_bytes": call}


def read(folder: Path) -> dict[str, Any] | None:
    """What a run's folder holds of found sizes; None where it holds none.

    Raises:
        InputError: it cannot be read, or is not what `BatchSizes` writes.
    """
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
        raise InputError(f"{path} is not what a run writes that finds its batches; take it away to find them again")
    return written


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def with_sizes(config: RunConfig, sizes: dict[str, int]) -> RunConfig:
    """The configuration with numbers in the place of `auto`."""
    return config.model_copy(update={"train": config.train.model_copy(update=sizes)})


def resolve_sizes(config: RunConfig, folder: Path) -> RunConfig:
    """The configuration of the run in a folder, with the sizes that it last had in the place of `auto`, if it has found any.

    Raises:
        InputError: what the folder holds of them cannot be read.
    """
    written = read(folder) if config.train.found else None
    last = written["held"][-1] if written and written["held"] else {}
    return with_sizes(config, {key: last[key] for key in config.train.found if key in last})
