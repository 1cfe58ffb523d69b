"""Proposals: a token for each open position, drawn from the predictor's distribution after temperature and filters.

A draw maps one number in [0, 1) through the inverse of the cumulated probabilities, in float64. LLaDA and others take the
argmax of logits with Gumbel noise: the same distribution from V random numbers a position instead of one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from flowgrpo.mdlm.decoding.tokens.logit_chunks import concatenate, portions
from flowgrpo.mdlm.decoding.tokens.step import DecodeStep, Setting, setting
from flowgrpo.schema.base import Choice, Count
from flowgrpo.schema.imports.heavy import Tensor, torch


@dataclass(frozen=True)
class Proposed:
    """Proposals for the N open positions of a step."""

    tokens: Tensor  # (N,)
    logits: Tensor  # (N, V) of the predictor
    # Returns log-probabilities (n, V) of a slice of positions under the distribution of the draws (at temperature 0, the
    # distribution of temperature 1). A function, because a table is as large as the logits and most scorers need none.
    log_probs: Callable[[slice], Tensor]
    log_prob: Tensor  # (N,) of the tokens, under `log_probs`


class Sample(Choice):
    """Draw from softmax(logits / temperature), cut by `top_k`, then by `top_p`.

    If logits are NaN the proposal is the argmax, never the mask, so that decoding ends; the update leaves the answer out.
    """

    name: Literal["sample"] = "sample"
    temperature: Setting = 0.0
    """Logits are divided by it; 0 takes the likeliest token, the first of equals."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Draw among the fewest tokens whose probabilities sum to at least this."""
    top_k: Count | None = None
    """Draw among this many likeliest tokens; null: among all."""

    def __call__(self, step: DecodeStep, logits: Tensor) -> Proposed:
        """Return proposals from logits (N, V)."""
        number, scale = self._tempered(step, logits)

        def log_probs(rows: slice) -> Tensor:
            part = logits[rows] if scale is None else logits[rows] / scale[rows]
            return filter_tokens(part.log_softmax(-1), self.top_p, self.top_k)

        tokens, log_prob = [], []
        for rows in portions(logits):
            table = log_probs(rows)
            if number is None:
                chosen = logits[rows].argmax(-1)
            else:
                chosen = categorical(table, number[rows])
                if int(chosen.max()) == logits.shape[-1]:
                    chosen = torch.where(chosen < logits.shape[-1], chosen, logits[rows].argmax(-1))
            tokens.append(chosen)
            log_prob.append(table.gather(-1, chosen[:, None])[:, 0])
        return Proposed(concatenate(tokens), logits, log_probs, concatenate(log_prob))

    def _tempered(self, step: DecodeStep, logits: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return the random numbers (N,) of the tokens and the temperatures (N, 1) that divide their logits.

        At temperature 0 the token is the argmax: its number is NaN, and its temperature here is 1. None replaces numbers
        that are all NaN, and temperatures that are all 1.
        """
        if not callable(self.temperature) and self.temperature in (0, 1):
            return step.uniform("token") if self.temperature else None, None
        temperature = setting(self.temperature, step)[step.owner]  # (N,)
        random = temperature > 0
        number = step.uniform("token").where(random, torch.nan) if random.any() else None
        return number, temperature.where(random, 1.0).to(logits.dtype)[:, None]


def categorical(log_probs: Tensor, uniform: Tensor) -> Tensor:
    """Return the token (N,) at which the cumulated probabilities first exceed the share `uniform` (N,) of their sum.

    `log_probs` is (N, V), `uniform` in [0, 1); even when rounded, a share below 1 stays below the sum. Returns V, which is
    no token, for a share or probability of NaN.
    """
    cumulated = log_probs.to(torch.float64, copy=True).exp_().cumsum_(-1)
    return torch.searchsorted(cumulated, uniform[:, None] * cumulated[:, -1:], right=True)[:, 0]


def filter_tokens(log_probs: Tensor, top_p: float = 1.0, top_k: int | None = None) -> Tensor:
    """Return log-probabilities (N, V), renormalised over the tokens that stay; -inf elsewhere.

    The token that reaches `top_p` stays, so at least one does (nucleus sampling, Holtzman et al., arXiv 1904.09751).
    """
    if top_p == 1 and (top_k is None or top_k >= log_probs.shape[-1]):
        return log_probs
    ordered, order = log_probs.sort(dim=-1, descending=True, stable=True)
    dropped = torch.zeros_like(ordered, dtype=torch.bool)
    if top_k is not None:
        dropped[:, top_k:] = True
        ordered = ordered.masked_fill(dropped, -torch.inf).log_softmax(-1)
    probs = ordered.exp()
    dropped |= probs.cumsum(-1) - probs >= top_p
    return log_probs.masked_fill(torch.zeros_like(dropped).scatter(-1, order, dropped), -torch.inf).log_softmax(-1)
