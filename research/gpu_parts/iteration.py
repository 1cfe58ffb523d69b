"""Seconds, memory and launches of an iteration's rollout, update and decoding, and what `flowgrpo plan` counts of them."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from importlib import metadata
from typing import Any, TypeVar

import torch

from flowgrpo.flow.planning.iteration_forecast import most_graphs
from flowgrpo.training.comparison import compare
from flowgrpo.training.loop import Loop
from flowgrpo.training.planning.gpu_scaling import Prices
from flowgrpo.training.planning.gpu_types import GPUS
from flowgrpo.training.planning.iteration_cost import Work
from flowgrpo.training.planning.memory_budget import Budget

PHASES = {"rollout": ("rollout", "decode"), "update": ("update",), "decode": ("decode",)}  # with their parts of a plan
Numbers = dict[str, float | None]
Built = TypeVar("Built")


_KEPT: dict[str, Any] = {}  # the model that was built last


def forget() -> None:
    """Free the model that was built last."""
    _KEPT.clear()
    _collect()


def _collect() -> None:
    gc.collect()  # loops of earlier parts refer to themselves
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def build_once(name: str, build: Callable[[], Built]) -> Built:
    """Return the model of a name, built unless it is the last one; another one is freed before."""
    if name not in _KEPT:
        forget()
        _KEPT[name] = build()
    _collect()
    return _KEPT[name]


def timed(work: Callable[[], object]) -> Numbers:
    """Return `seconds`, `host` and `gib` of a piece of work.

    `seconds` are wall seconds until the GPU has finished. `host` are the CPU seconds of this process until all is enqueued,
    the time of launches if the work does not wait for the GPU. A full queue of launches makes it wait: calls of one row tell
    most. `gib` is the peak of allocated memory in GiB, None without a GPU.
    """
    there = torch.cuda.is_available()
    if there:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    started, spent = time.perf_counter(), time.process_time()
    work()
    spent = time.process_time() - spent
    if there:
        torch.cuda.synchronize()
    taken = time.perf_counter() - started
    return {"seconds": taken, "host": spent, "gib": torch.cuda.max_memory_allocated() / 2**30 if there else None}


def measure(
    loop: Loop,
    network: torch.nn.Module | None,
    decode: Callable[[], object] | None = None,
    *,
    keeps_graphs: bool = False,
) -> dict[str, Any]:
    """Return the measured numbers of an iteration, after another one that warms up.

    Args:
        network: whose first call of the rollout is made again, without and with a backward pass; None for none.
        decode: decodes the rows of one call; None for texts.
        keeps_graphs: let the rollout keep all graphs for the update; raises MemoryError if they do not fit.

    Returns:
        As in `timed`: `rollout` with decoding and scoring, `update`, `decode`, `forward`, `backward`, and as `beside` a
        forward pass while another thread decodes. Further the seconds of the iteration before, `warm_up`, and the largest
        |log ratio| before the first optimizer step, `log_ratio`.
    """
    state, wing = loop.state, loop.wing
    batch: Any = None
    ratio: float | None = None
    if keeps_graphs:
        every = len(most_graphs(state.config, len(state.policy.sigmas) - 1).graph_rows)
        wing.kept_graphs.restore({"graph_steps": every})  # as a resumed run: free memory alone is the limit
        with state.report:
            wing.start(wing.rollout, loop.batch_sizes.to_come)
        if wing.kept_graphs.steps < every:
            raise MemoryError("the graphs of a rollout do not fit into memory")

    def rollout() -> None:
        nonlocal batch
        batch = wing.rollout(0, state.groups(0))

    def update() -> None:
        nonlocal ratio
        minibatches = wing.minibatches(batch, compare(state, wing, wing.units(batch), batch))
        minibatches.prepare()
        stats = [minibatches.step(number) for number in range(len(minibatches))]
        ratio = stats[0].max_abs_log_ratio

    with nullcontext() if network is None else _first_call(network) as call:
        warm_up = [timed(rollout), timed(update)]
    found = {"rollout": timed(rollout), "update": timed(update)}
    batch = None
    if decode is not None:
        found["decode"] = timed(decode)
    if network is not None:
        found |= _passes(network, *call[0], decode=decode)
    return {**found, "warm_up": sum(each["seconds"] for each in warm_up), "log_ratio": ratio}


def _passes(
    network: torch.nn.Module, given: tuple, named: dict, *, decode: Callable[[], object] | None
) -> dict[str, Numbers]:
    def learn() -> torch.Tensor:
        return network(*given, **named)[0]

    forward = torch.no_grad()(learn)
    beside = {} if decode is None else {"beside": timed(lambda: _at_once(forward, decode))}
    return {
        "forward": timed(forward),
        "backward": timed(lambda: learn().float().square().mean().backward()),
        **beside,
    }


def _at_once(one: Callable[[], object], other: Callable[[], object]) -> None:
    """Do two pieces of work at once, the second one in a thread and, on a GPU, on a stream of its own."""

    def work() -> None:
        with torch.cuda.stream(torch.cuda.Stream()) if torch.cuda.is_available() else nullcontext():
            other()

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(work)
        one()
        done.result()


@contextmanager
def _first_call(network: torch.nn.Module) -> Iterator[list[tuple[tuple, dict]]]:
    """Record the arguments of a network's first call inside this context."""
    calls: list[tuple[tuple, dict]] = []

    def record(module: torch.nn.Module, given: tuple, named: dict) -> None:
        calls.append((given, named))
        hook.remove()

    hook = network.register_forward_pre_hook(record, with_kwargs=True)
    try:
        yield calls
    finally:
        hook.remove()


def planned(budget: Budget, work_of: Callable[[Budget], Work]) -> dict[str, Any]:
    """Return what `flowgrpo plan` counts of an iteration.

    `operations` of `rollout` with decoding, `update` and `decode`; `launches` of a forward pass; `seconds` of the phases by
    type of GPU; `gib` of the peak without kept graphs, and `graphs_gib` of these.
    """
    work = work_of(budget)
    operations = {
        part: sum(count * rows * each.operations for each in calls for count, rows in each.sizes(1))
        for part, calls in work.calls.items()
    }
    step = work.calls["rollout"][0]
    costs = {gpu: Prices(gpu_type=gpu, fixed=0.0).cost(budget, work).seconds for gpu in GPUS}

    def phases(numbers: Mapping[str, float]) -> dict[str, float]:
        return {phase: sum(numbers.get(part, 0.0) for part in parts) for phase, parts in PHASES.items()}

    return {
        "operations": phases(operations),
        "launches": step.launches / step.gathers,
        "seconds": {gpu: phases(seconds) for gpu, seconds in costs.items()},
        "gib": budget.peak() / 2**30,
        "graphs_gib": budget.kept_graphs(0)["bytes"] / 2**30,
    }


def by_rows(budget: Budget, work_of: Callable[[Budget], Work], rows: Iterable[int]) -> dict[str, Any]:
    """Return `planned` by numbers of rows in a call."""
    keys = ("train.micro_batch", "train.rollout_batch")
    return {str(count): planned(budget.with_settings(dict.fromkeys(keys, count)), work_of) for count in rows}


def machine() -> dict[str, Any]:
    """Return the GPU's name, its name in `flowgrpo plan` (None if unknown there), and versions."""
    there = torch.cuda.is_available()
    return {
        "gpu": torch.cuda.get_device_name() if there else None,
        "type": gpu_type() if there else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        **{name: metadata.version(name) for name in ("diffusers", "transformers", "peft")},
    }


def gpu_type() -> str | None:
    """Return this GPU's name in `flowgrpo plan`, or None."""
    words = torch.cuda.get_device_name().lower().replace("rtx ", "rtx").split()
    return next((name for name in GPUS if name in words), None)
