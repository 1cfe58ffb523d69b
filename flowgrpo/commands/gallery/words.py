"""What pages say of a configuration in words."""

from __future__ import annotations

from typing import Any


def trained_weights(lora: dict[str, Any] | None) -> str:
    """What of the model is trained."""
    if lora is None:
        return "full"
    path = lora.get("path")
    if path is None:
        return f"LoRA rank {lora['rank']}"
    return f"LoRA from {path if isinstance(path, str) else ', '.join(path.values())}"
