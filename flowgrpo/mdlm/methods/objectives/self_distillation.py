"""Self-distillation: the policy learns what good branches wrote on the canvas that they leave together."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pydantic import Field

from flowgrpo.mdlm.methods.objectives.every_process import Gather, gather_rows
from flowgrpo.schema.base import Positive, Strict
from flowgrpo.schema.imports.heavy import Tensor, torch

COLDEST = 1e-6  # temperature below which the released code does not go


@dataclass(frozen=True, kw_only=True)
class BranchTokens:
    """The L tokens of each of B answers of an optimizer step."""

    advantage: Tensor  # (B, L) of the branch of each token
    scored: Tensor  # (B, L) bool, each token of a branch in one answer only
    origin: Tensor  # (B, L, ...) int64 canvas that the branch of each token leaves


class SelfDistillation(Strict):
    """Divergence of what good siblings wrote from the policy (d-TreeRPO, arXiv 2512.09675 and THU-BPM/d-TreeRPO).

    Siblings leave one canvas. At each position of it where siblings k of A > 0 wrote tokens, q gives each token the sum of
    w_k = exp(A_k / temperature) of those that wrote it, divided by the sum over k. The loss is `weight` times the mean over
    all positions of all canvases of KL(q || p), where p is the policy's prediction on the canvas. Only -q log p has a
    gradient, which needs no more than the log-probabilities of the tokens that siblings wrote.

    Over training, from t = 0 to 1, the weight rises as (e^(growth t) - 1) / (e^growth - 1), from 0. The temperature falls as
    (1 - t)^power, so that q ends at the best sibling.
    """

    weight: Positive = 3e-3
    """Weight of the loss in the last iteration."""
    growth: Positive = 2.0
    """How late the weight rises: in the exponent of the run's done part."""
    temperature: Positive = 2.0
    """Temperature of the advantages in the first iteration."""
    power: float = Field(0.7, ge=0)
    """Exponent of the run's remaining part, by which the temperature falls; 0: it is constant."""

    def weight_at(self, done: float) -> float:
        """Return the weight of the loss when the part `done` (0 to 1) of the iterations is done."""
        return self.weight * math.expm1(self.growth * done) / math.expm1(self.growth)

    def temperature_at(self, done: float) -> float:
        """Return the temperature when the part `done` (0 to 1) of the iterations is done."""
        return max(self.temperature * (1 - done) ** self.power, COLDEST)

    def pull(self, tokens: BranchTokens, done: float) -> Tensor:
        """Return the weight (B, L) float32 of each token's -log p in the loss; `tokens` are all of an optimizer step."""
        good = tokens.scored & (tokens.advantage > 0)
        pull = torch.zeros(good.shape)
        if not good.any():
            return pull
        column = torch.arange(good.shape[1]).expand(good.shape)[good]
        places = torch.cat([tokens.origin[good].flatten(1), column[:, None]], dim=1)
        found, number = places.unique(dim=0, return_inverse=True)
        power = tokens.advantage[good].double() / self.temperature_at(done)
        top = power.new_full((len(found),), -torch.inf).scatter_reduce(0, number, power, "amax")
        share = torch.exp(power - top[number])
        total = share.new_zeros(len(found)).index_add(0, number, share)
        return pull.masked_scatter(good, (self.weight_at(done) / len(found) * share / total[number]).float())


def pull_tokens(rule: SelfDistillation, tokens: BranchTokens, done: float, *, gather: Gather, rank: int) -> Tensor:
    """Return the weights (B, L) of this process's tokens, among those of all; a collective call, see `gather_rows`."""
    every, own = gather_rows(vars(tokens), gather, rank)
    return rule.pull(BranchTokens(**every), done)[own].to(tokens.advantage.device)
