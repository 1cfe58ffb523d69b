"""Whether a pipeline can run in slices of its schedule, and how, found by running it on a few rows.

A rollout runs a pipeline step by step, with many rows in a call. Some pipelines count their own steps, some let rows of one
call change each other, some do to their latents in the loop what decoding needs. Nothing here knows which: it looks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from flowgrpo.data.prompts import Row
from flowgrpo.errors import InputError
from flowgrpo.flow.pipeline.batching import Capabilities, cut, join
from flowgrpo.flow.pipeline.call_arguments import SIZES
from flowgrpo.flow.pipeline.denoising_loop import DenoisingLoop, check_equal_shapes
from flowgrpo.training.run.stop_reasons import is_lost
from rewards.memory import is_out_of_memory
from samplers.kernels import State

EXACT, HALF_PRECISION = 1e-3, 0.1  # tolerance of two ways to the same sample, in its standard deviations
BATCHING = [(True, None), (False, None), (False, 1)]  # (pads_prompts, max_batch), from the loosest


@torch.no_grad()
def probe(walk: DenoisingLoop, rows: Sequence[Row], key: str, known: Capabilities) -> Capabilities:
    """Run one sample whole and again step by step, which must agree, then rows together and alone; return what was found.

    Args:
        walk: the pipeline.
        rows: some of those to come, best of unequal prompts.
        key: the place of the call arguments in the config.
        known: what was found before, which the result equals or tightens.

    Raises:
        InputError: the pipeline refuses its call arguments, or counts its own steps (skip-layer guidance and the like).
    """
    with refusals(walk, key):
        whole, expected = _whole_run(walk, rows[:1])
        gap = _slicing_gap(walk, rows[:1], whole)
        if not gap <= _tolerance(walk):
            raise InputError(_slicing_fault(walk, rows[:1], gap, key))
        by_landing = _decodes_by_landing(walk, rows[:1], whole, expected=expected, known=known.decodes_by_landing)
    return probe_batching(walk, rows, replace(known, decodes_by_landing=by_landing))


@contextmanager
def refusals(walk: DenoisingLoop, key: str) -> Iterator[None]:
    """Context that turns what a pipeline raises into an `InputError`, but for a lack of memory or of another process.

    Args:
        key: the place of the call arguments in the config.
    """
    try:
        yield
    except InputError:
        raise
    except (ValueError, TypeError) as error:
        raise InputError(f"{key}: {_refusal(walk, error)}") from error
    except Exception as error:  # whatever a pipeline raises that was made for another kind of scheduler
        if is_out_of_memory(error) or is_lost(error):
            raise
        raise InputError(f"model.path: {_refusal(walk, error)}") from error


@torch.no_grad()
def probe_batching(walk: DenoisingLoop, rows: Sequence[Row], known: Capabilities) -> Capabilities:
    """Find out how far rows can share a call with each sample as it is alone; the first row is tried with two seeds.

    Returns:
        `known`, with `pads_prompts`, `max_batch` and `starts_alone` tightened where the samples of `rows` ask for it.
    """
    rows = [rows[0], replace(rows[0], seed=rows[0].seed + 1), *rows[1:]]
    with walk.uncounted():
        states = [walk.start([row]) for row in rows]
        check_equal_shapes(states)
        later = walk.pins and len(walk.sigmas) > 2  # the first step begins before anything is pinned
        state, sigma = join(states), walk.sigmas[1 if later else 0]
        alone = join([walk.velocity(own, sigma, [row]) for own, row in zip(states, rows, strict=True)])
        for pads_prompts, max_batch in BATCHING[BATCHING.index((known.pads_prompts, known.max_batch)) :]:
            capabilities = replace(known, pads_prompts=pads_prompts, max_batch=max_batch)
            if max_batch == 1 or _shares(walk, capabilities, rows, state=state, sigma=sigma, alone=alone):
                break
        if not _draws_together(walk, capabilities, rows, state):
            return capabilities
        shared = not walk.pins and _decodes_together(walk, capabilities, rows, state)
    return replace(capabilities, starts_alone=True) if shared else replace(capabilities, max_batch=1)


def _shares(
    walk: DenoisingLoop, capabilities: Capabilities, rows: Sequence[Row], *, state: State, sigma: float, alone: State
) -> bool:
    """Whether batches of these capabilities give each row the velocity that it has `alone` at `sigma`."""
    batches = cut(walk, capabilities, rows, state)
    return _is_as_alone(walk, lambda: [walk.velocity(part, sigma, batch) for batch, part in batches], alone)


def _draws_together(walk: DenoisingLoop, capabilities: Capabilities, rows: Sequence[Row], state: State) -> bool:
    """Whether batches of these capabilities start from other states than each row does alone: from `state`."""
    if capabilities.max_batch == 1:
        return False
    batches = cut(walk, capabilities, rows)
    return not _is_as_alone(walk, lambda: [walk.start(batch) for batch, _ in batches], state)


def _decodes_together(walk: DenoisingLoop, capabilities: Capabilities, rows: Sequence[Row], state: State) -> bool:
    """Whether batches of these capabilities decode states, of which no call that decodes is given any, as each row does."""

    def decoded(by: Capabilities) -> list[State]:
        batches = cut(walk, by, rows, state)
        return [(walk.decode(part, batch, by.decodes_by_landing),) for batch, part in batches]

    alone = join(decoded(replace(capabilities, max_batch=1)))
    return _is_as_alone(walk, lambda: decoded(capabilities), alone)


def _is_as_alone(walk: DenoisingLoop, make: Callable[[], list[State]], alone: State) -> bool:
    """Whether what is made in batches is what each row makes alone."""
    try:
        together = join(make())
    except Exception as error:  # each row alone has just run: it is their sharing that is refused
        if is_out_of_memory(error) or is_lost(error):
            raise
        return False
    pairs = zip(together, alone, strict=True)
    return all((a - b).float().abs().max() <= _tolerance(walk) * b.float().std() for a, b in pairs)


def _whole_run(walk: DenoisingLoop, rows: Sequence[Row]) -> tuple[State, torch.Tensor]:
    """Final states of the pipeline's own loop, and what it decodes them to."""
    decoded, recorded = walk.run_slice(rows, None, output_type="pt", record=True)
    last = recorded[-1].sigma
    return tuple(step.next_sample for step in recorded if step.sigma == last), decoded


def _slicing_gap(walk: DenoisingLoop, rows: Sequence[Row], whole: State) -> float:
    """Largest difference of final states between a whole run and its slices, in standard deviations."""
    state = walk.start(rows)
    for step in range(len(walk.sigmas) - 1):
        recorded, _ = walk.step(rows, range(step, step + 1), state)
        state = tuple(each.next_sample for each in recorded)
    gaps = [(x - w).float().abs().max() / w.float().std() for x, w in zip(state, whole, strict=True)]
    return float(torch.stack(gaps).max())  # unlike Python's max, this keeps NaN


def _slicing_fault(walk: DenoisingLoop, rows: Sequence[Row], gap: float, key: str) -> str:
    """Which call argument makes a slice differ, if one does."""
    name = type(walk.pipe).__name__
    if gap != gap:
        return f"model.dtype: the final latents of {name} are not finite, try bfloat16 or float32"
    for argument, value, does, remedy in _suspects(walk):
        with walk.call_overrides(**{argument: value}):
            try:
                helps = _slicing_gap(walk, rows, _whole_run(walk, rows)[0]) <= _tolerance(walk)
            except (InputError, ValueError, TypeError, RuntimeError):  # not an argument it can do without
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
    """Arguments that may make a slice differ, each with a value that may help: those given, without them, then any number at
    0, the smallest first; and what is to be said of it.
    """
    sizes = ("num_inference_steps", *SIZES)  # without them a run is another, and a large one
    for argument in walk.call:
        if argument not in sizes:
            yield argument, None, "counts its own steps for it", "remove it"
    defaults = {k: p.default for k, p in inspect.signature(type(walk.pipe).__call__).parameters.items()} | walk.call
    numbers = {k: v for k, v in defaults.items() if isinstance(v, float) and v}
    for argument in sorted(numbers, key=lambda k: abs(numbers[k])):
        yield argument, 0.0, "changes its steps by it as they go on", "set it to 0"


def _decodes_by_landing(
    walk: DenoisingLoop, rows: Sequence[Row], state: State, *, expected: torch.Tensor, known: bool
) -> bool:
    """False where decoding final states alone gives what a whole run gives, True where landing on them does."""
    for by_landing in (known, True):
        gap = (walk.decode(state, rows, by_landing).float() - expected.float()).abs().max()
        if gap <= _tolerance(walk) * expected.float().std():
            return by_landing
    raise InputError(
        f"model.path: {type(walk.pipe).__name__} decodes a final state otherwise than its own loop does, so it cannot be "
        "trained here"
    )


def _tolerance(walk: DenoisingLoop) -> float:
    exact = next(iter(walk.modules.values())).dtype == torch.float32 and walk.autocast is None
    return EXACT if exact else HALF_PRECISION


def _refusal(walk: DenoisingLoop, error: Exception) -> str:
    name = type(walk.pipe).__name__
    kind = "" if isinstance(error, (ValueError, TypeError)) else f"{type(error).__name__}: "
    reason = kind + " ".join(str(error).split())[:300]
    return f"{name} refuses it: {reason}"
