"""Finished answers, whose likelihood is estimated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from flowgrpo.mdlm.decoding.network.block_attention import positions
from flowgrpo.schema.imports.heavy import Tensor, torch

if TYPE_CHECKING:
    from samplers.noise import Address

Scope = Literal["eos", "canvas"]


@dataclass(frozen=True, kw_only=True)
class Answers:
    """B finished canvases: a prompt, padded on the left, and the L tokens of the answer."""

    ids: Tensor  # (B, T) int64, T = P + L, without a mask token
    attention_mask: Tensor  # (B, T) bool, False at padding
    scored: Tensor  # (B, L) bool, the tokens whose log-probability is estimated
    # Address of each row's random masks (see `samplers.noise`). The policy, the old policy and the reference must use the
    # same addresses; then they get the same masks in any batch.
    addresses: Sequence[tuple[Address, ...]]
    # (B, L) int64 step that committed each token, or the number of splits before it; -1 for given ones; None if unknown
    steps: Tensor | None = None
    # Tokens of a block in a block-causal model; None for full attention. Such a model predicts each block from the
    # finished earlier blocks, even if a view hides some of their tokens.
    block_size: int | None = None

    @property
    def prompt_length(self) -> int:
        """P, the first column of the answers."""
        return self.ids.shape[1] - self.scored.shape[1]

    @property
    def given(self) -> Tensor:
        """(B, L) bool: tokens that were there before decoding and are not scored; every view shows them."""
        return torch.zeros_like(self.scored) if self.steps is None else (self.steps < 0) & ~self.scored

    @property
    def blocks(self) -> Tensor | None:
        """(B, L) int64 number of each token's block; None for full attention."""
        if self.block_size is None:
            return None
        return positions(self.attention_mask)[:, self.prompt_length :] // self.block_size

    @property
    def length(self) -> Tensor:
        """(B,) int64 number of scored tokens."""
        return self.scored.sum(1)

    def of(self, rows: Tensor) -> Answers:
        """Select answers by their rows (int64)."""
        return Answers(
            ids=self.ids[rows],
            attention_mask=self.attention_mask[rows],
            scored=self.scored[rows],
            addresses=[self.addresses[row] for row in rows.tolist()],
            steps=None if self.steps is None else self.steps[rows],
            block_size=self.block_size,
        )


def in_scope(completion: Tensor, eos_id: int, scope: Scope) -> Tensor:
    """Return which tokens (B, L) bool of completions are scored: `eos` up to and with the first EOS, `canvas` all.

    A model tuned on answers padded with EOS, such as LLaDA, gives the padding a likelihood too, which `canvas` includes.
    That is a large part of the sum, and depends on the answer's length only.
    """
    if scope == "canvas":
        return torch.ones_like(completion, dtype=torch.bool)
    ended = (completion == eos_id).cumsum(1)
    return (ended - (completion == eos_id).long()) == 0
