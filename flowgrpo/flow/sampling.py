"""Sampling of a flow model, with an adapter or without."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flowgrpo.data import conditions
from flowgrpo.data.prompts import Row
from flowgrpo.errors import InputError
from flowgrpo.flow.pipeline import loading
from flowgrpo.flow.pipeline.modality import sampling_rate
from flowgrpo.training import checkpoint
from flowgrpo.training.samples import SAMPLING_RATE, Sampler


def sampler(
    model: str,
    rows: Sequence[Row],
    *,
    call: dict[str, Any],
    adapter: Path | None,
    dtype: str,
    quantise: str | None = None,
) -> Sampler:
    """Load a model and return it ready to sample rows by ODE.

    Args:
        model: a built-in name, a local folder or a hub id.
        call: arguments of the pipeline's call.
        adapter: a folder that `flowgrpo export` wrote.
        quantise: `int8`, `fp8` or `nf4` for the base; see `flowgrpo.training.quantise`.

    Raises:
        InputError: there is no such model, adapter or argument, or the rows have conditions that it does not take.
    """
    if adapter is not None:
        if not (adapter / loading.LORA_FILE).is_file():
            raise InputError(f"--adapter {adapter}: there is no {loading.LORA_FILE}, which flowgrpo export writes")
        checkpoint.check_tensors(adapter / loading.LORA_FILE)
    policy = loading.load_policy(model, dtype, call, adapter=adapter, quantise=quantise)
    conditions.check((row.columns for row in rows), policy.takes, "--prompts")
    return Sampler(rows, policy.generate, "ode", sampling_rate(policy.pipe) or SAMPLING_RATE)
