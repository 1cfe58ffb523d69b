"""Names of the diffusers attention backends that may compute a rollout; usable without importing diffusers."""

from __future__ import annotations

import re
from typing import Literal

from flowgrpo.errors import InputError

# Backends without quantisation.
AttentionBackend = Literal[
    "native",
    "_native_cudnn",
    "_native_efficient",
    "_native_flash",
    "_native_math",
    "_native_npu",
    "_native_xla",
    "flash",
    "flash_hub",
    "flash_varlen",
    "flash_varlen_hub",
    "flash_4_hub",
    "_flash_3",
    "_flash_3_hub",
    "_flash_varlen_3",
    "_flash_3_varlen_hub",
    "aiter_fa2_hub",
    "flex",
    "xformers",
]


def refuse_lossy_attention(name: str, key: str) -> None:
    """Raise InputError for an attention backend that quantises; `key` is where it was set."""
    if re.search("sage|int8|fp8|fp4", name):
        raise InputError(
            f"{key}: {name!r} quantises, so the log-probs of a rollout would not be the model's; it may serve previews "
            f"(DIFFUSERS_ATTN_BACKEND={name} flowgrpo sample ...), not training"
        )
