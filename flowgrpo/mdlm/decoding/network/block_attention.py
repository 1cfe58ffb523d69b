"""Which positions see which: all, or those of their own and of earlier blocks, and what is known of the models.

A block-causal model (block diffusion: BD3-LM, arXiv 2503.09573; LLaDA2, SDAR, Fast-dLLM v2) writes one block after the
other. Blocks are counted from the first token of a row, prompt included, as the released code of all three decodes: the
first block of an answer may begin with the end of its prompt.
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
    """A model type that attends in blocks: the key of its config that has their size, and the size where it has not."""

    key: str
    size: int | None = None


BLOCK_TYPES = {
    "llada2_moe": BlockType("block_length", 32),
    "sdar": BlockType("block_size"),  # 4 in the first releases; later ones have it in their names, as b32
    "sdar_moe": BlockType("block_size"),
    "Fast_dLLM_Qwen": BlockType("bd_size", 32),
}
REFUSED = {"diffusion_gemma": "its canvas holds random tokens where others have masks"}


def known_block_size(
    config: Mapping[str, Any], attention: Attention | None = None, block_size: int | None = None
) -> int | None:
    """Tokens of a block of a model; None if its attention is full.

    Args:
        config: the model's own.
        attention: as the user has it; None for what is known of the model's type, full if nothing is.
        block_size: likewise.

    Raises:
        InputError: the type is not one of ours, attends otherwise than the user says, or its block size is unknown.
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
    found = block_size or (known and (config.get(known.key) or known.size))
    if not found:
        raise InputError(f"model.block_size: unknown for a {kind}, give the tokens of a block that it was trained with")
    return found


def positions(mask: Tensor) -> Tensor:
    """Position (B, T) of each token in its own row, counted from the first that is not padding (B, T) bool; 0 at padding."""
    return (mask.long().cumsum(1) - 1).clamp(min=0)


def block_causal(query: Tensor, key: Tensor) -> Tensor:
    """Which keys (B, Q, K) bool queries see, by the numbers (B, Q) and (B, K) of their blocks."""
    return key[:, None, :] <= query[:, :, None]


def clean_prefix(block: Tensor, noisy: Tensor) -> Tensor:
    """Which keys (B, K, K) bool queries see in a row that holds a clean canvas and a noisy copy (BD3-LM's mask).

    A noisy position sees its own noisy block and the clean ones before it, a clean position the clean blocks up to its own.

    Args:
        block: (B, K) number of each position's block.
        noisy: (K,) bool, which positions are of the copy.
    """
    query, key = block[:, :, None], block[:, None, :]
    return ((key < query) & ~noisy) | ((key == query) & (noisy == noisy[:, None]))
