"""Probes: run a pipeline on a few rows to find out whether and how it runs in slices of its schedule.

A rollout runs a pipeline step by step, with many rows in a call. Not all pipelines allow this: some count their own steps,
in some the rows of a call affect each other, and some prepare their latents for decoding inside the loop. No pipeline is
hard-coded here.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol

import torch
from typing_extensions import override

from flowgrpo.data.prompts import Row
from flowgrpo.errors import InputError
from flowgrpo.flow.pipeline.batching import Capabilities, cut, join
from flowgrpo.flow.pipeline.call_arguments import SIZES
from flowgrpo.flow.pipeline.denoising_loop import DenoisingLoop, check_equal_shapes
from flowgrpo.training.run.stop_reasons import is_lost
from rewards.audio import Films, tensors
from rewards.memory import is_out_of_memory
from samplers.kernels import State

LOGGER = logging.getLogger(__name__)
EXACT, HALF_PRECISION = 1e-3, 0.1  # tolerances, in standard deviations of a sample
Run = Callable[[Sequence[Row], State], State]
MULTIPLE = re.compile(r"(?:height|width)\b.*?(?:divisible by|multiples of) \(?(\d+)(?:, (\d+))?", re.IGNORECASE)
BATCHING = [(True, None), (False, None), (False, 1)]  # (pads_prompts, max_batch), loosest first


class Velocities(Protocol):
    """The part of a policy that `mixes_levels` probes; see `Policy`."""

    @property
    def sigmas(self) -> tuple[float, ...]:
        """Return the schedule."""

    @property
    def pins(self) -> bool:
        """Return whether the loop overwrites a part of each state; known after the first call of `start`."""

    def start(self, rows: Sequence[Row]) -> State:
        """Return initial states (B, ...)."""

    def velocity(self, state: State, sigma: float | torch.Tensor, rows: Sequence[Row]) -> State:
        """Return the velocity at a sigma, or at a sigma of each row."""


@torch.no_grad()
def probe(walk: DenoisingLoop, rows: Sequence[Row], key: str, known: Capabilities) -> Capabilities:
    """Compare a whole run with single steps, and a batch with single rows; return the capabilities found.

    `rows` are examples, best with unequal prompts. `key` is the config key of the call arguments, for errors. The
    result equals or tightens `known`, the earlier findings. Raise InputError if the pipeline refuses its call
    arguments, or its steps depend on each other, as in skip-layer guidance.
    """
    with refusals(walk, key):
        whole, expected = _whole_run(walk, rows[:1])
        gap = _slicing_gap(walk, rows[:1], whole)
        if not gap <= tolerance_of(walk):
            raise InputError(_slicing_fault(walk, rows[:1], gap, key))
        by_landing = _decodes_by_landing(walk, rows[:1], whole, expected=expected, known=known.decodes_by_landing)
        travels = known.travels and _travels(walk, rows[:1])
    return probe_batching(walk, rows, replace(known, decodes_by_landing=by_landing, travels=travels))


@contextmanager
def refusals(walk: DenoisingLoop, key: str) -> Iterator[None]:
    """Return a context that turns a pipeline's exceptions into InputErrors, except out-of-memory and lost processes.

    A height or width that the pipeline would round, with a warning, is an InputError too.
    """
    sizes, logger = _SizeWarnings(walk, key), logging.getLogger("diffusers")
    logger.handlers.insert(0, sizes)
    try:
        yield
    except InputError:
        raise
    except (ValueError, TypeError) as error:
        raise InputError(_size_fault(walk, key, str(error)) or f"{key}: {_refusal(walk, error)}") from error
    except Exception as error:  # a pipeline for another kind of scheduler may raise anything
        if is_out_of_memory(error) or is_lost(error):
            raise
        raise InputError(f"model.path: {_refusal(walk, error)}") from error
    finally:
        logger.handlers.remove(sizes)


class _SizeWarnings(logging.Handler):
    """Raises InputError for a warning that a pipeline rounds the height or width of its call."""

    def __init__(self, walk: DenoisingLoop, key: str) -> None:
        super().__init__(logging.WARNING)
        self._walk, self._key = walk, key

    @override
    def emit(self, record: logging.LogRecord) -> None:
        fault = _size_fault(self._walk, self._key, record.getMessage())
        if fault is not None:
            raise InputError(fault)


def _size_fault(walk: DenoisingLoop, key: str, message: str) -> str | None:
    """Return which size of the call a pipeline's `message` is about, with the nearest valid ones; None if it is not."""
    found = MULTIPLE.search(message)
    if found is None:
        return None
    for name, multiple in (("height", int(found[1])), ("width", int(found[2] or found[1]))):
        size = walk.call.get(name)
        if isinstance(size, int) and size % multiple:
            below = size - size % multiple
            nearest = " or ".join(str(each) for each in (below, below + multiple) if each > 0)
            return f"{key}.{name}: {size} is not a multiple of {multiple}; take {nearest}"
    return None


@torch.no_grad()
def probe_batching(walk: DenoisingLoop, rows: Sequence[Row], known: Capabilities) -> Capabilities:
    """Find the loosest batching in which each row gives the same results as alone; `rows[0]` also runs with a second seed.

    Return `known`, with `pads_prompts`, `max_batch` and `starts_alone` tightened if `rows` need it.
    """
    rows = [rows[0], replace(rows[0], seed=rows[0].seed + 1), *rows[1:]]

    def compute(by: Capabilities, run: Run, given: State) -> State:
        return join([run(batch, part) for batch, part in cut(walk, by, rows, given)])

    def equals(expected: State, by: Capabilities, run: Run, given: State) -> bool:
        """Return whether batches give the results that each row gives alone."""
        return _equals(expected, lambda: compute(by, run, given), tolerance_of(walk))

    def decode(batch: Sequence[Row], part: State) -> State:
        return tensors(walk.decode(part, batch, known.decodes_by_landing))

    with walk.uncounted():
        states = [walk.start([row]) for row in rows]
        check_equal_shapes(states)
        later = walk.pins and len(walk.sigmas) > 2  # nothing is pinned before the first step
        state, sigma = join(states), walk.sigmas[1 if later else 0]

        def velocity(batch: Sequence[Row], part: State) -> State:
            return walk.velocity(part, sigma, batch)

        single = replace(known, pads_prompts=False, max_batch=1)
        alone = compute(single, velocity, state)
        for pads_prompts, max_batch in BATCHING[BATCHING.index((known.pads_prompts, known.max_batch)) :]:
            capabilities = replace(known, pads_prompts=pads_prompts, max_batch=max_batch)
            if max_batch == 1 or equals(alone, capabilities, velocity, state):
                break
        if max_batch == 1 or equals(state, capabilities, lambda batch, _: walk.start(batch), ()):
            return capabilities
        if not walk.pins and equals(compute(single, decode, state), capabilities, decode, state):
            return replace(capabilities, starts_alone=True)
    return replace(capabilities, pads_prompts=False, max_batch=1)


@torch.no_grad()
def mixes_levels(model: Velocities, row: Row, tolerance: float) -> bool:
    """Return whether rows of unequal noise levels may share a call: whether each has the velocity that it has alone.

    `row` runs with three seeds, at the first and the last sigma of the schedule and at one that is not in it. The largest
    allowed difference is `tolerance` standard deviations. A loop that pins its state cannot mix levels.
    """
    rows = [replace(row, seed=row.seed + i) for i in range(3)]
    state = join([model.start([each]) for each in rows])
    if model.pins:
        return False
    sigmas = torch.tensor([model.sigmas[0], model.sigmas[-2], model.sigmas[-2] / 2])
    parts = [tuple(x[i : i + 1] for x in state) for i in range(3)]
    alone = [model.velocity(*each) for each in zip(parts, sigmas.tolist(), [[each] for each in rows], strict=True)]
    return _equals(join(alone), lambda: model.velocity(state, sigmas, rows), tolerance)


def _equals(expected: State, compute: Callable[[], State], tolerance: float) -> bool:
    """Return whether a batch gives the results `expected` (B, ...), which each of its rows gives alone."""
    try:
        together = compute()
    except Exception as error:  # each row ran alone, so the batch is at fault
        if is_out_of_memory(error) or is_lost(error):
            raise
        return False
    pairs = zip(together, expected, strict=True)
    return all((a - b).float().abs().max() <= tolerance * b.float().std() for a, b in pairs)


def _whole_run(walk: DenoisingLoop, rows: Sequence[Row]) -> tuple[State, torch.Tensor | Films]:
    decoded, recorded = walk.run_slice(rows, None, output_type="pt", record=True)
    last = recorded[-1].sigma
    return tuple(step.next_sample for step in recorded if step.sigma == last), decoded


def _slicing_gap(walk: DenoisingLoop, rows: Sequence[Row], whole: State) -> float:
    """Return the largest difference between the final states of a whole run and of single steps, in standard deviations."""
    state = walk.start(rows)
    for step in range(len(walk.sigmas) - 1):
        recorded, _ = walk.step(rows, range(step, step + 1), state)
        state = tuple(each.next_sample for each in recorded)
    gaps = [(x - w).float().abs().max() / w.float().std() for x, w in zip(state, whole, strict=True)]
    return float(torch.stack(gaps).max())  # keeps NaN, unlike Python's max


def _travels(walk: DenoisingLoop, rows: Sequence[Row]) -> bool:
    """Return whether the second step of an open call has the velocity of the same step alone, bit for bit.

    After a step some loops have their state in another layout of memory, and half precision rounds otherwise there.
    """
    if len(walk.sigmas) < 3:
        return True  # no step follows another
    if walk.pins:
        return False
    with walk.uncounted():
        state = walk.start(rows)
        if len(state) > 1:
            return False
        first, second = walk.sigmas[:2]
        met: list[tuple[State, State]] = []

        def onward(velocity: State) -> State:
            at = state if not met else met[0][0]
            landed = tuple(x + (second - first) * v.to(x.dtype) for x, v in zip(at, velocity, strict=True))
            met.append((landed, velocity))
            return landed

        try:
            walk.travel(state, range(2), rows, onward)
        except Exception as error:  # single steps ran, so the open call is at fault
            if is_out_of_memory(error) or is_lost(error):
                raise
            LOGGER.info("this pipeline takes single steps (%s: %s)", type(error).__name__, error)
            return False
        (reached, _), (_, open_velocity) = met
        alone = walk.velocity(reached, second, rows)
    return all(torch.equal(a, b) for a, b in zip(alone, open_velocity, strict=True))


def _slicing_fault(walk: DenoisingLoop, rows: Sequence[Row], gap: float, key: str) -> str:
    """Return the message for a pipeline that fails in slices, with the call argument at fault if one is found."""
    name = type(walk.pipe).__name__
    if gap != gap:
        return f"model.dtype: the final latents of {name} are not finite, try bfloat16 or float32"
    for argument, value, does, remedy in _suspects(walk):
        with walk.call_overrides(**{argument: value}):
            try:
                helps = _slicing_gap(walk, rows, _whole_run(walk, rows)[0]) <= tolerance_of(walk)
            except (InputError, ValueError, TypeError, RuntimeError):  # the argument is required
                continue
            if helps:
                return (
                    f"{key}.{argument}: {name} {does}, so a step alone differs from the same step in a whole run (by "
                    f"{gap:.1e} of a standard deviation), {remedy}"
                )
    return (
        f"model.path: a step of {name} alone differs from the same step in a whole run (by {gap:.1e} of a standard "
        "deviation), so it cannot be trained here"
    )


def _suspects(walk: DenoisingLoop) -> Iterator[tuple[str, float | None, str, str]]:
    """Yield call arguments that may make slices differ from a whole run: name, value to try, cause and remedy as text.

    First each given argument is left out; then each non-zero number is set to 0, the smallest first.
    """
    sizes = ("num_inference_steps", *SIZES)  # kept: their defaults would make another, larger run
    for argument in walk.call:
        if argument not in sizes:
            yield argument, None, "counts its own steps for it", "remove it"
    defaults = {k: p.default for k, p in inspect.signature(type(walk.pipe).__call__).parameters.items()} | walk.call
    numbers = {k: v for k, v in defaults.items() if isinstance(v, float) and v}
    for argument in sorted(numbers, key=lambda k: abs(numbers[k])):
        yield argument, 0.0, "treats some steps differently because of it", "set it to 0"


def _decodes_by_landing(
    walk: DenoisingLoop, rows: Sequence[Row], state: State, *, expected: torch.Tensor | Films, known: bool
) -> bool:
    """Return whether decoding must run the last step, which then returns the final states; `known` is tried first."""
    for by_landing in (known, True):
        pairs = zip(tensors(walk.decode(state, rows, by_landing)), tensors(expected), strict=True)
        if all((a - b).abs().max() <= tolerance_of(walk) * b.std() for a, b in pairs):
            return by_landing
    raise InputError(
        f"model.path: {type(walk.pipe).__name__} decodes a final state otherwise than its own loop does, so it cannot be "
        "trained here"
    )


def tolerance_of(walk: DenoisingLoop) -> float:
    """Return the largest difference of equal results, in standard deviations of a sample."""
    exact = next(iter(walk.modules.values())).dtype == torch.float32 and walk.autocast is None
    return EXACT if exact else HALF_PRECISION


def _refusal(walk: DenoisingLoop, error: Exception) -> str:
    name = type(walk.pipe).__name__
    kind = "" if isinstance(error, (ValueError, TypeError)) else f"{type(error).__name__}: "
    reason = kind + " ".join(str(error).split())[:300]
    call = ", ".join(f"{key}: {value!r}" for key, value in walk.call.items())
    return f"{name} refuses {{{call}}}: {reason}"
