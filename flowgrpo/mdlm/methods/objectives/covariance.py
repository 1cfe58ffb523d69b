"""Clip-Cov and KL-Cov: tokens whose log-probability moves with the advantage, which make the entropy fall."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import Field, model_validator

from flowgrpo.errors import InputError
from flowgrpo.mdlm.methods.objectives.every_process import Gather, gather_rows
from flowgrpo.schema.base import Positive, Strict
from flowgrpo.schema.imports.heavy import Tensor, torch


@dataclass(frozen=True, kw_only=True)
class ScoredTokens:
    """The L tokens of each of B answers of an optimizer step."""

    advantage: Tensor  # (B,) or (B, L)
    scored: Tensor  # (B, L) bool
    log_prob: Tensor  # (B, L) under the policy that sampled
    draw: Tensor  # (B, L) float64 uniform random number of each token, at its own address


class Covariance(Strict):
    """Choice of the tokens that lower the entropy most (arXiv 2505.22617), by c = (A - mean A) (log p - mean log p).

    The means are over the scored tokens of an optimizer step. Log-probabilities are those of the policy that sampled, in the
    released code those of the trained policy; both are the same until it moves. The code also leaves tokens out that PPO's
    clip stops, which have no gradient here either.
    """

    rule: Literal["clip", "kl"] = "clip"
    """clip: a random choice among the tokens with c within `bounds` has no gradient (Clip-Cov); kl: the tokens of largest c
    have the penalty coefficient |log ratio|, and no token has a clip range (KL-Cov)."""
    share: float = Field(2e-4, gt=0, le=1)
    """Share of the scored tokens that is chosen, at least one token."""
    bounds: list[float] = Field([1.0, 5.0], min_length=2, max_length=2)
    """With clip, c of the tokens to choose from lies between these."""
    coefficient: Positive = 1.0
    """With kl, the weight of the penalty."""

    @model_validator(mode="after")
    def _used(self) -> Covariance:
        for key, rule in (("bounds", "clip"), ("coefficient", "kl")):
            if self.rule != rule and getattr(self, key) != type(self).model_fields[key].default:
                raise InputError(f"algorithm.objective.covariance.{key}: {self.rule} has none, take rule={rule}")
        if self.bounds[0] >= self.bounds[1]:
            raise InputError(
                f"algorithm.objective.covariance.bounds: {self.bounds} is empty, write the lower one first"
            )
        return self

    def choose(self, tokens: ScoredTokens) -> Tensor:
        """Return which tokens (B, L) bool of all those of an optimizer step are chosen."""
        chosen = torch.zeros_like(tokens.scored)
        if not tokens.scored.any():
            return chosen
        each = tokens.advantage if tokens.advantage.ndim == 2 else tokens.advantage[:, None]
        advantage, log_prob = (x.expand(chosen.shape)[tokens.scored].double() for x in (each, tokens.log_prob))
        covariance = (advantage - advantage.mean()) * (log_prob - log_prob.mean())
        order = tokens.draw[tokens.scored].argsort()  # random, whatever the order of answers
        if self.rule == "kl":
            order = order[covariance[order].argsort(descending=True, stable=True)]
        else:
            low, high = self.bounds
            order = order[((covariance > low) & (covariance < high))[order]]
        places = tokens.scored.nonzero()[order[: max(1, int(self.share * len(covariance)))]]
        chosen[places[:, 0], places[:, 1]] = True
        return chosen


def choose_tokens(covariance: Covariance, tokens: ScoredTokens, gather: Gather, rank: int) -> Tensor:
    """Return the chosen tokens (B, L) bool of this process, among those of all; a collective call, see `gather_rows`."""
    every, own = gather_rows(vars(tokens), gather, rank)
    return covariance.choose(ScoredTokens(**every))[own].to(tokens.scored.device)
