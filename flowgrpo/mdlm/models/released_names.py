"""Which released models bring code of their own, by the type in their config.json; known before transformers is imported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TYPES = ("llada", "Dream", "sdar", "sdar_moe", "Fast_dLLM_Qwen", "llada2_moe")  # of `architectures.ARCHITECTURES`


def is_released(written: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of one of these models.

    LLaDA-MoE calls itself llada too, and is another model.
    """
    kind = written.get("model_type")
    return kind in TYPES and not (kind == "llada" and "num_experts" in written)
