"""Whether a pipeline can be walked in steps, and how, found by running it on a few rows.

A rollout walks a pipeline step by step, with many rows in a call. Some pipelines count their own steps, some let rows of one
call change each other, some do to their latents in the loop what decoding needs. Nothing here knows which: it looks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from flowgrpo.errors import InputError
from samplers.kernels import State

if TYPE_CHECKING:
    from flowgrpo.data.prompts import Row
    from flowgrpo.flow.pipeline.policy import DiffusersPolicy

EXACT, HALF_PRECISION = 1e-3, 0.1  # tolerance of two ways to the same sample, in its standard deviations
BATCHING = [(True, None), (False, None), (False, 1)]  # (pads, rows_per_call), from the loosest


def fit(policy: DiffusersPolicy, rows: Sequence[Row], key: str) -> None:
    """Run one sample whole and again step by step, which must agree; then settle the policy's `lands`, `pads` and
    `rows_per_call`. What was settled before is only ever tightened.

    Args:
        rows: some of those to come, best of unequal prompts.
        key: the place of the call arguments in the config.

    Raises:
        InputError: the pipeline refuses its call arguments, or counts its own steps (skip-layer guidance and the like).
    """
    try:
        whole, decoded = _whole(policy, rows[:1])
        gap = _slicing_gap(policy, rows[:1], whole)
        if not gap <= _tolerance(policy):
            raise InputError(_slicing_fault(policy, rows[:1], gap, key))
        _settle_decoding(policy, rows[:1], whole, decoded)
    except InputError:
        raise
    except (ValueError, TypeError) as error:
        raise InputError(f"{key}: {_refusal(policy, error)}") from error
    except torch.OutOfMemoryError as error:
        raise InputError(
            f"{key}: one sample of {type(policy.pipe).__name__} does not fit into the memory, ask for a smaller one, or set "
            "model.text_encoders=free, model.vae=offload or model.vae_tiling=true"
        ) from error
    except Exception as error:  # whatever a pipeline raises that was made for another kind of scheduler
        raise InputError(f"model.path: {_refusal(policy, error)}") from error
    settle_batching(policy, rows)


def _whole(policy: DiffusersPolicy, rows: Sequence[Row]) -> tuple[State, torch.Tensor]:
    """Final states of the pipeline's own loop, and what it decodes them to."""
    decoded, made = policy.walk(rows, None, output_type="pt", record=True)
    last = made[-1].sigma
    return tuple(step.next_sample for step in made if step.sigma == last), decoded


def _slicing_gap(policy: DiffusersPolicy, rows: Sequence[Row], whole: State) -> float:
    """Largest difference of final states between a whole run and its slices, in standard deviations."""
    state = policy.start(rows)
    for step in range(len(policy.sigmas) - 1):
        _, made = policy.walk(rows, range(step, step + 1), state)
        state = tuple(each.next_sample for each in made)
    gaps = [(x - w).float().abs().max() / w.float().std() for x, w in zip(state, whole, strict=True)]
    return float(torch.stack(gaps).max())  # unlike Python's max, this keeps NaN


def _slicing_fault(policy: DiffusersPolicy, rows: Sequence[Row], gap: float, key: str) -> str:
    """Which call argument makes a slice differ, if one does."""
    name = type(policy.pipe).__name__
    if gap != gap:
        return f"model.dtype: the final latents of {name} are not finite, try bfloat16 or float32"
    for argument in policy.call:
        if argument not in ("num_inference_steps", "height", "width"):
            with policy.calling(**{argument: None}):
                try:
                    helps = _slicing_gap(policy, rows, _whole(policy, rows)[0]) <= _tolerance(policy)
                except (ValueError, TypeError, RuntimeError):  # not an argument it can do without
                    continue
                if helps:
                    return (
                        f"{key}.{argument}: {name} counts its own steps for it, so a step alone differs from the same step "
                        f"in a whole run (by {gap:.1e} of a standard deviation), remove it"
                    )
    return (
        f"model.path: a step of {name} alone differs from the same step in a whole run (by {gap:.1e} of a standard "
        "deviation), so it cannot be trained here"
    )


def _settle_decoding(policy: DiffusersPolicy, rows: Sequence[Row], state: State, expected: torch.Tensor) -> None:
    """Decode final states alone if that gives what a whole run gives, else by landing on them."""
    for lands in (policy.lands, True):
        policy.lands = lands
        gap = (policy.decode(state, rows) - expected.float()).abs().max()
        if gap <= _tolerance(policy) * expected.float().std():
            return
    raise InputError(
        f"model.path: {type(policy.pipe).__name__} decodes a final state otherwise than its own loop does, so it cannot be "
        "trained here"
    )


@torch.no_grad()
def settle_batching(policy: DiffusersPolicy, rows: Sequence[Row]) -> None:
    """Let rows share a call as far as that leaves each sample as it is alone; the first row is tried twice."""
    counted = policy.evaluations  # finding out how a pipeline works is no work of the run's
    try:
        _settle_batching(policy, [rows[0], replace(rows[0], seed=rows[0].seed + 1), *rows[1:]])
    finally:
        policy.evaluations = counted


def _settle_batching(policy: DiffusersPolicy, rows: Sequence[Row]) -> None:
    states = [policy.start([row]) for row in rows]
    sigma = policy.sigmas[0]
    alone = [policy.velocity(own, sigma, [row]) for own, row in zip(states, rows, strict=True)]
    policy.check_shapes(states)
    state, apart = (tuple(torch.cat(column) for column in zip(*parts, strict=True)) for parts in (states, alone))
    for choice in BATCHING[BATCHING.index((policy.pads, policy.rows_per_call)) :]:
        policy.pads, policy.rows_per_call = choice
        if policy.rows_per_call == 1:
            return
        try:
            together = policy.velocity(state, sigma, rows)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # each row alone has just run: it is their sharing that is refused
            continue
        pairs = zip(together, apart, strict=True)
        if all((a - b).float().abs().max() <= _tolerance(policy) * b.float().std() for a, b in pairs):
            return


def _tolerance(policy: DiffusersPolicy) -> float:
    exact = next(iter(policy.modules.values())).dtype == torch.float32 and policy.autocast is None
    return EXACT if exact else HALF_PRECISION


def _refusal(policy: DiffusersPolicy, error: Exception) -> str:
    name = type(policy.pipe).__name__
    kind = "" if isinstance(error, (ValueError, TypeError)) else f"{type(error).__name__}: "
    reason = kind + " ".join(str(error).split())[:300]
    if "strength" in policy.takes:
        return f"{name}, which cuts its schedule by strength, cannot walk a slice of it: {reason}"
    return f"{name} refuses it: {reason}"
