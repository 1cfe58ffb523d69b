"""Sampling to a folder: samples of prompts by a model, with an adapter or without, and a manifest of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flowgrpo.commands.sample import BATCH, asked, batches, check_folder, line_of
from flowgrpo.data import conditions
from flowgrpo.errors import InputError
from flowgrpo.flow.pipeline import loading
from flowgrpo.flow.pipeline.modality import sampling_rate
from flowgrpo.training import checkpoint
from flowgrpo.training.samples import SAMPLING_RATE, save_sample


def sample_to_folder(
    model: str,
    texts: Sequence[str] | None,
    prompts_file: str | None,
    out: Path,
    call: dict[str, Any],
    adapter: Path | None,
    seed: int,
    dtype: str,
) -> list[dict[str, Any]]:
    """Sample every prompt once, prompt i from seed + i; returns the manifest's lines.

    Raises:
        InputError: there is no such model, adapter or prompt file, or `out` holds samples already.
    """
    rows = asked(texts, prompts_file, seed)
    check_folder(out)
    if adapter is not None and not (adapter / "pytorch_lora_weights.safetensors").is_file():
        raise InputError(
            f"--adapter {adapter}: there is no pytorch_lora_weights.safetensors, which flowgrpo export writes"
        )
    if adapter is not None:
        checkpoint.check_tensors(adapter / loading.LORA_FILE)
    policy = loading.load_policy(model, dtype, call)
    if adapter is not None:
        loading.load_lora(policy.pipe, adapter)
    conditions.check((row.columns for row in rows), policy.takes, "--prompts")
    rate = sampling_rate(policy.pipe) or SAMPLING_RATE
    out.mkdir(parents=True, exist_ok=True)
    lines = []
    with (out / "manifest.jsonl").open("w") as manifest:
        for part in batches(rows, BATCH):
            for row, decoded in zip(part, policy.generate(part), strict=True):
                file = save_sample(decoded, out / f"{len(lines):04d}", rate)
                lines.append(line_of(file, row))
                manifest.write(json.dumps(lines[-1]) + "\n")
    return lines
