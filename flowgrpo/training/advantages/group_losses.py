"""Losses that couple the samples of a group, for flow models and language models; each returns a scalar."""

from __future__ import annotations

from flowgrpo.schema.imports.heavy import Tensor, torch


def regression_loss(log_ratio: Tensor, advantage: Tensor, *, scale: float | None, eps: float) -> Tensor:
    """Return Reg-GRPO's loss of a group of G samples (arXiv 2506.07464): mean (A - s (rho - mean rho))^2.

    rho (G,) is the log ratio, A (G,) the advantage. With `scale` None, s = 1 / (std of rho + eps), which has a gradient,
    too. For A of mean 0 and variance 1 and eps towards 0 the loss is then 2 - 2 corr(A, rho): it sets a direction and no
    size. Where rho is 0 its gradient is -2 A / (G eps), so eps acts as an inverse learning rate. The paper does not say
    its eps. With a number, s is `scale`, and the minimum is rho - mean rho = A / scale, for A of mean 0. A group of equal
    advantages has no gradient.
    """
    if (advantage == advantage[0]).all():
        return advantage.square().mean() + 0 * log_ratio.sum()
    centred = log_ratio - log_ratio.mean()
    if scale is None:
        std = torch.linalg.vector_norm(centred) / len(centred) ** 0.5  # its gradient is 0 where all are equal, not NaN
        predicted = centred / (std + eps)
    else:
        predicted = centred * scale
    return (advantage - predicted).square().mean()
