"""Losses that couple the samples of a group, for flow models and language models; each returns a scalar."""

from __future__ import annotations

import math

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


def contrast_loss(score: Tensor, good: Tensor, *, temperature: float | None, rank: Tensor | None = None) -> Tensor:
    """Return DisCO's loss of a group of G samples (arXiv 2505.12366), which raises scores of good ones above bad ones.

    With the scores s (G,) and the mask `good` (G,) it is -(mean of s over good - t log mean of exp(s / t) over bad), t =
    `temperature`. So bad samples of high score weigh more; for t towards infinity all bad samples weigh alike. None takes
    the standard deviation of the group's scores for t, without gradient: the weights of bad samples then do not depend on
    the unit of scores. In every group with good and bad samples the total gradient is -1 over the good and 1 over the bad,
    however many they are. The loss of other groups is 0.

    DRPO (arXiv 2510.04474) replaces the mean over the good by weights softmax(rank) over the good, with `rank` (G,) a
    second reward over its own temperature. An unknown rank (NaN) counts as the mean of the known ones of the good.
    """
    if good.all() or not good.any():
        return 0 * score.sum()
    ranks = torch.zeros_like(score[good]) if rank is None else rank[good].to(score)
    weight = torch.softmax(ranks.where(ranks.isfinite(), ranks.nanmean()).nan_to_num(), 0)
    if temperature is None:
        spread = float(score.detach().std(correction=0))
        temperature = spread if spread > 0 else 1.0  # any, where all scores are equal
    bad = score[~good] / temperature
    return temperature * (torch.logsumexp(bad, 0) - math.log(len(bad))) - (weight * score[good]).sum()


def trust_loss(log_ratio: Tensor, *, limit: float, penalty: float) -> Tensor:
    """Return DisCO's penalty on the KL of the policy from the one that sampled: penalty sg(max(KL - limit, 0)) KL.

    KL = -mean of the log ratios (G,); sg is without gradient. The released code takes the KL of a batch.
    """
    kl = -log_ratio.mean()
    return penalty * (kl.detach() - limit).clamp(min=0) * kl
