"""Finished answers: what a likelihood is estimated of."""

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
    """B finished canvases: a prompt, padded on the left, and the L tokens of the answer.

    Attributes:
        ids: (B, T) int64, T = P + L, without a masked token.
        attention_mask: (B, T) bool, False on padding.
        scored: (B, L) bool, the tokens whose log-probability is asked for.
        addresses: of each row, where its random masks are drawn (see `samplers.noise`). Who draws at the same addresses gets
            the same masks, whatever the batch; the policy, the old one and the reference must.
        steps: (B, L) int64, the step of the decoder that committed each token, -1 for one that was given; None if unknown.
        block_size: tokens of a block of a block-causal model, which predicts each block given the earlier ones as they are
            in the answer, whatever a view hides of them; None for full attention.
    """

    ids: Tensor
    attention_mask: Tensor
    scored: Tensor
    addresses: Sequence[tuple[Address, ...]]
    steps: Tensor | None = None
    block_size: int | None = None

    @property
    def prompt_length(self) -> int:
        """P: where the answers begin."""
        return self.ids.shape[1] - self.scored.shape[1]

    @property
    def given(self) -> Tensor:
        """(B, L) bool: tokens that were there before the decoder began, and are not asked for; every view shows them."""
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
        """Some of the answers, by their rows (int64)."""
        return Answers(
            ids=self.ids[rows],
            attention_mask=self.attention_mask[rows],
            scored=self.scored[rows],
            addresses=[self.addresses[row] for row in rows.tolist()],
            steps=None if self.steps is None else self.steps[rows],
            block_size=self.block_size,
        )


def in_scope(completion: Tensor, eos_id: int, scope: Scope) -> Tensor:
    """Which tokens (B, L) bool of completions (B, L) are scored: `eos` up to and with the first EOS, `canvas` all.

    A model that was tuned on answers padded with EOS (LLaDA's are) also has a likelihood of the padding, which `canvas`
    counts in; it is a large part of the sum and says nothing of the answer but its length.
    """
    if scope == "canvas":
        return torch.ones_like(completion, dtype=torch.bool)
    ended = (completion == eos_id).cumsum(1)
    return (ended - (completion == eos_id).long()) == 0
