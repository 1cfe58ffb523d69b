"""The expected reward of one drawn token, from logits, and its policy gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from flowgrpo.mdlm.decoding.tokens.logit_chunks import concatenate, fine, portions

Tensor = torch.Tensor


def one_token_reward(logits: Tensor, tokens: Tensor, wrong: float, temperature: float) -> Tensor:
    """Return the mean reward (N,) of tokens a drawn from q = softmax(logits / temperature), in float32 or finer.

    The reward R_a is 1 if a is the known token (N,), else `wrong`. The gradient is sum_a q_a R_a grad log p_a with
    p = softmax(logits) and q without gradient: the mean of what draws would give, without their variance. At temperature 1
    it is (1 - wrong) p_y grad log p_y, where y is the known token.

    No table as large as the logits (N, V) is kept for the backward pass.
    """
    return _Reward.apply(logits, tokens, (wrong, temperature))


class _Reward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, tokens: Tensor, options: tuple[float, float]) -> Tensor:
        ctx.save_for_backward(logits, tokens)
        ctx.options = wrong, temperature = options
        parts = [_draws(logits[rows], temperature).gather(-1, tokens[rows, None])[:, 0] for rows in portions(logits)]
        right = concatenate(parts) if parts else fine(logits[:, 0])
        return wrong + (1 - wrong) * right

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None, None]:
        (logits, tokens), (wrong, temperature) = ctx.saved_tensors, ctx.options
        gradient = torch.empty_like(logits)
        for rows in portions(logits):
            known = tokens[rows, None]
            drawn = _draws(logits[rows], temperature)  # q
            right = (1 - wrong) * drawn.gather(-1, known)
            # sum_a q_a R_a (e_a - p), with R = wrong + (1 - wrong) e_y
            table = drawn.mul_(wrong).sub_((wrong + right) * fine(logits[rows]).softmax(-1))
            gradient[rows] = table.scatter_add_(-1, known, right).mul_(slope[rows, None])
        return gradient, None, None


def _draws(logits: Tensor, temperature: float) -> Tensor:
    return (fine(logits) / temperature).softmax(-1)
