"""Hints: parts of a known solution that a completion is given from the start, for prompts that nothing else solves."""

from __future__ import annotations

import torch

from flowgrpo.errors import InputError
from samplers.noise import Address, generator

Tensor = torch.Tensor


def hints(
    reasoning: Tensor,
    length: int,
    mask_id: int,
    seed: Address,
    chunk: tuple[int, int] = (5, 10),
    share: tuple[float, float] = (0.2, 0.6),
    tail: int = 30,
    stretch: float = 1.5,
) -> Tensor:
    """Fixed tokens (L,) of a completion: random chunks of a solution at about the places they would have in it.

    IGPO (arXiv 2509.10396 and its code). The solution's reasoning is cut into chunks, of which a random share is revealed,
    the last one never; places are stretched by (L - tail) / (its length), between 1 and `stretch`. Our readings: a chunk
    stays in one piece, only its beginning is moved; the share is of all chunks, rounded down; what would end after L - tail
    is not revealed.

    Args:
        reasoning: (n,) tokens of the solution without its final answer.
        length: L.
        seed: address of the randomness, one for each completion.
        chunk: least and most tokens of a chunk, uniform.
        share: least and most of the revealed share, uniform.
        tail: positions at the end that are left to the answer.

    Returns:
        (L,) tokens, `mask_id` where nothing is revealed.

    Raises:
        InputError: the tail leaves no room.
    """
    if not 0 <= tail < length:
        raise InputError(f"inpainting.tail: {tail} is not between 0 and the length {length}")
    drawn = generator(seed, "hints")
    starts, ends = [], [0]
    while ends[-1] < len(reasoning):
        starts.append(ends[-1])
        ends.append(min(ends[-1] + int(drawn.integers(chunk[0], chunk[1], endpoint=True)), len(reasoning)))
    count = int(drawn.uniform(*share) * len(starts))
    revealed = drawn.permutation(max(len(starts) - 1, 0))[:count]
    factor = min(max((length - tail) / max(len(reasoning), 1), 1.0), stretch)
    fixed = torch.full((length,), mask_id, dtype=torch.long, device=reasoning.device)
    for i in revealed:
        tokens = reasoning[starts[i] : ends[i + 1]]
        at = int(starts[i] * factor)
        if at + len(tokens) <= length - tail:
            fixed[at : at + len(tokens)] = tokens
    return fixed
