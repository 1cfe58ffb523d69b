"""The model types of `mdlm.models.architectures`, without its import of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TYPES = ("llada", "Dream", "sdar", "sdar_moe", "Fast_dLLM_Qwen", "llada2_moe")  # keys of `architectures.ARCHITECTURES`


def is_released(written: Mapping[str, Any]) -> bool:
    """Return whether a config.json has one of these types; LLaDA-MoE, whose type is also llada, does not count."""
    kind = written.get("model_type")
    return kind in TYPES and not (kind == "llada" and "num_experts" in written)
