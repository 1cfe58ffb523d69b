"""Full and block-causal attention, and the model types known to be block-causal.

A block-causal model (block diffusion: BD3-LM, arXiv 2503.09573; LLaDA2, SDAR, Fast-dLLM v2) writes one block after the
other. Blocks are counted from the first token of a row, prompt included, as in the released code of all three: the first
block of an answer may begin with the end of its prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from flowgrpo.errors import InputError
from flowgrpo.schema.imports.heavy import Tensor

Attention = Literal["full", "block"]


@dataclass(frozen=True)
class BlockType:
    """A block-causal model type: the config key of its block size, and the size where the key is missing."""

    key: str
    size: int | None = None


BLOCK_TYPES = {
    "llada2_moe": BlockType("block_length", 32),
    "sdar": BlockType("block_size"),  # 4 in the first releases; later ones have it in their names, as b32
    "sdar_moe": BlockType("block_size"),
    "Fast_dLLM_Qwen": BlockType("bd_size", 32),
}
REFUSED = {"diffusion_gemma": "its canvas holds random tokens where others have masks"}


def find_block_size(
    config: Mapping[str, Any], attention: Attention | None = None, block_size: int | None = None
) -> int | None:
    """Return the tokens of a block of a model; None if its attention is full.

    `config` is the model's config.json; `attention` and `block_size` are the user's, None for the model type's values.
    Raises InputError if the type is not supported, does not have the attention asked for, or has no known block size.
    """
    kind = config.get("model_type")
    if kind in REFUSED:
        raise InputError(f"model.path: a {kind} is not supported, {REFUSED[kind]}")
    known = BLOCK_TYPES.get(str(kind))
    if known is None and attention != "block":
        if block_size is not None:
            raise InputError(f"model.block_size: a {kind} has full attention unless model.attention is block")
        return None
    if attention == "full":
        raise InputError(f"model.attention: a {kind} attends in blocks, full is not what it was trained with")
    block_size = block_size or (known and (config.get(known.key) or known.size))
    if not block_size:
        raise InputError(f"model.block_size: unknown for a {kind}, give the tokens of a block that it was trained with")
    return block_size


def positions(mask: Tensor) -> Tensor:
    """Return each token's position (B, T), counted from its row's first token; 0 at padding, where `mask` is False."""
    return (mask.long().cumsum(1) - 1).clamp(min=0)


def block_causal(query: Tensor, key: Tensor) -> Tensor:
    """Return which keys each query sees, (B, Q, K) bool; `query` (B, Q) and `key` (B, K) are the numbers of their blocks."""
    return key[:, None, :] <= query[:, :, None]


def clean_prefix(block: Tensor, noisy: Tensor) -> Tensor:
    """Return which keys each query sees, (B, K, K) bool, in a row of a clean canvas and a noisy copy (BD3-LM's mask).

    A noisy position sees its own noisy block and the clean ones before it, a clean position the clean blocks up to its own.
    `block` (B, K) numbers the blocks of positions; `noisy` (K,) bool marks the copy.
    """
    query, key = block[:, :, None], block[:, None, :]
    return ((key < query) & ~noisy) | ((key == query) & (noisy == noisy[:, None]))
