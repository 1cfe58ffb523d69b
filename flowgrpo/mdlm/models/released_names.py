"""The model types of released models with code of their own; needs no transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TYPES = ("llada", "Dream", "sdar", "sdar_moe", "Fast_dLLM_Qwen", "llada2_moe")  # of `architectures.ARCHITECTURES`


def is_released(written: Mapping[str, Any]) -> bool:
    """Return whether a config.json is that of one of these models; LLaDA-MoE, also of type llada, is not."""
    kind = written.get("model_type")
    return kind in TYPES and not (kind == "llada" and "num_experts" in written)
