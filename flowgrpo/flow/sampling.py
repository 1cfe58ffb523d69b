"""Sampling of a flow model, with an adapter or without."""

from __future__ import annotations

from collections.abc import Sequence

from flowgrpo.data import conditions
from flowgrpo.data.prompts import Row
from flowgrpo.errors import InputError
from flowgrpo.flow.pipeline import loading
from flowgrpo.flow.pipeline.modality import frame_rate, sampling_rate
from flowgrpo.training import checkpoint
from flowgrpo.training.samples import SAMPLING_RATE, ModelUse, Sampler


def sampler(use: ModelUse, rows: Sequence[Row]) -> Sampler:
    """Load a model and return it ready to sample rows by ODE.

    Raises:
        InputError: there is no such model, adapter or argument, or the rows have conditions that it does not take.
    """
    adapter = use.adapter
    if adapter is not None:
        if not (adapter / loading.LORA_FILE).is_file():
            raise InputError(f"--adapter {adapter}: there is no {loading.LORA_FILE}, which flowgrpo export writes")
        checkpoint.check_tensors(adapter / loading.LORA_FILE)
    policy = loading.load_policy(use.path, use.dtype, use.call, adapter=adapter, quantise=use.quantise)
    conditions.check((row.columns for row in rows), policy.takes, "--prompts")
    return Sampler(
        rows,
        policy.generate,
        "ode",
        sampling_rate=sampling_rate(policy.pipe) or SAMPLING_RATE,
        frame_rate=frame_rate(policy.pipe, policy.call),
    )
