"""Weights of single tokens, by their predictions or by what other answers have in their place.

They multiply the weights of `aggregation`, in the KL term too. Their mean over the scored tokens of an optimizer step is 1,
over all processes. The prediction of a token is that in the views that score it, a mean by their weights, under the policy
that sampled it and at temperature 1: of the distribution that the update trains. The decoder's prediction would be of other
contexts and at its temperature; for `trajectory` and temperature 1 both are the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, model_validator

from flowgrpo.errors import InputError
from flowgrpo.mdlm.methods.objectives.every_process import Gather, gather_rows
from flowgrpo.schema.base import Positive, Rate, Strict
from flowgrpo.schema.imports.heavy import Tensor, torch

OPTIONS = {  # each option of `Shape` and the rule that has it
    "sharpness": "confident",
    "quantile": "uncertain",
    "share": "largest",
    "end": "largest",
    "slope": "pivotal",
    "alpha": "divergent",
    "temperature": "departed",
}
LEAST = 1e-6  # nats; smaller entropies count as this one where their logarithm is taken


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """The L tokens of each of B answers of an optimizer step."""

    advantage: Tensor  # (B,) or (B, L)
    group: Tensor  # (B,) int64
    ids: Tensor  # (B, L) int64
    scored: Tensor  # (B, L) bool
    step: Tensor  # (B, L) int64 step of each token, `Views.first`
    measure: Tensor  # (B, L) of each scored token, the number that `Shape.measure` names; 0 where none is known

    @property
    def each_advantage(self) -> Tensor:
        """(B, L) advantage of each token."""
        each = self.advantage if self.advantage.ndim == 2 else self.advantage[:, None]
        return each.expand(self.scored.shape)


def confident(tokens: Tokens, sharpness: float) -> Tensor:
    """Return weights (N,) of the scored tokens: exp(-k h), so that steps of low entropy weigh more.

    EMPG (arXiv 2509.09265): h is the mean entropy of the tokens of a step of an answer, mapped linearly to 0..1 over the
    optimizer step; k = `sharpness`. Departures:

     1. Steps are those of the decoder; the paper's are those of an agent.
     2. No bonus for a clear next step, because it adds to the advantage, whatever the sign of it.
    """
    count = int(tokens.step.max()) + 1
    place = (torch.arange(len(tokens.step))[:, None] * count + tokens.step)[tokens.scored]
    entropy = _means(tokens.measure[tokens.scored].double(), place, len(tokens.step) * count)[place]
    low, high = entropy.min(), entropy.max()
    return torch.exp(-sharpness * (entropy - low) / (high - low)) if high > low else torch.ones_like(entropy)


def uncertain(tokens: Tokens, quantile: float) -> Tensor:
    """Return weights (N,) of the scored tokens, from 0 for the least entropy to 1 from its `quantile` on, linear in ln H.

    HAPO (arXiv 2509.16591 and its code): the advantage is multiplied by 1 + h, where h = (ln H - its quantile) / scale lies
    within -1..0 below the quantile. Departures:

     1. This is the code's rule for ratios within half of the clip range. Beyond that it strengthens tokens above the
        quantile and moves the clip range.
     2. The scale makes the least h -1 (reconstructed); how the code sets it was not at hand.
    """
    logs = tokens.measure[tokens.scored].double().clamp(min=LEAST).log()
    middle = torch.quantile(logs, quantile)
    low = logs.min()
    return (1 + ((logs - middle) / (middle - low)).clamp(max=0)) if middle > low else torch.ones_like(logs)


def conflict(tokens: Tokens) -> Tensor:
    """Return weights (N,) of the scored tokens; tokens that good and bad answers of a group share weigh 2 and 0, others 1.

    GTPO (arXiv 2508.03772 and its code): a good answer (A > 0) has the same token at the same place as a bad one (A < 0).
    In the good one it weighs 2, in the bad one 0. No entropy is used. Departures:

     1. Places are those of the canvas. The code looks at unbroken runs from the start or the end of answers, which move
        against each other.
     2. No penalties on the entropy of answers.
    """
    places = torch.arange(tokens.ids.shape[1]).expand(tokens.ids.shape)
    groups = tokens.group[:, None].expand(tokens.ids.shape)
    keys = torch.stack([groups[tokens.scored], places[tokens.scored], tokens.ids[tokens.scored]], dim=1)
    _, number = keys.unique(dim=0, return_inverse=True)
    advantage = tokens.each_advantage[tokens.scored].double()
    good, bad = (torch.zeros(len(keys)).scatter_add_(0, number, side.float()) > 0
                 for side in (advantage > 0, advantage < 0))  # fmt: skip
    return torch.where((good & bad)[number], 1 + advantage.sign(), 1.0)


def largest(tokens: Tokens, share: float) -> Tensor:
    """Return weights (N,) of the scored tokens: 1 for the `share` of largest |A| H, 0 for the others.

    The token rule of D3S (arXiv 2509.22115); its other rule, `train.select`, chooses answers. Tokens with the product of the
    last one kept are kept, too.
    """
    product = tokens.each_advantage[tokens.scored].double().abs() * tokens.measure[tokens.scored].double()
    kept = max(1, round(share * len(product)))
    return (product >= product.sort(descending=True).values[kept - 1]).double()


def pivotal(tokens: Tokens, slope: float) -> Tensor:
    """Return weights (N,) of the scored tokens: sigmoid(slope z), z = (H - mean) / std over the tokens of a group.

    The entropy gate of ERPO (arXiv 2603.28204). Departures:

     1. Reconstructed from another implementation's account of equation 8 of the paper.
     2. No signal of progress, normalised in buckets, is added to the advantage.
    """
    entropy = tokens.measure[tokens.scored].double()
    of_group, place = _groups(tokens)
    mean = _means(entropy, place, of_group)[place]
    std = _means((entropy - mean).square(), place, of_group)[place].sqrt()
    return torch.sigmoid(slope * ((entropy - mean) / std).where(std > 0, 0.0))


def divergent(tokens: Tokens, alpha: float) -> Tensor:
    """Return weights (N,) of the scored tokens: 1 + (alpha - 1) D, D the spread of predictions over a group, from 0 to 1.

    TW-GRPO (arXiv 2505.24718 and its code): D is `group_spread` of the token's place, mapped linearly to 0..1 over the
    scored places of its group. Departures:

     1. No gradient goes through the weights.
     2. Their mean is 1; the code's is between 1 and alpha.
    """
    spread = tokens.measure[tokens.scored].double()
    of_group, place = _groups(tokens)
    low, high = (spread.new_zeros(of_group).scatter_reduce_(0, place, spread, kind, include_self=False)[place]
                 for kind in ("amin", "amax"))  # fmt: skip
    return 1 + (alpha - 1) * ((spread - low) / (high - low)).where(high > low, 0.0)


def departed(tokens: Tokens, temperature: float) -> Tensor:
    """Return weights (N,) of the scored tokens: T softmax(s / temperature) over the T scored tokens of each answer.

    DGPO of tokens (arXiv 2605.03327): s is `gated_distances`, large where a prediction has left the reference and is
    uncertain. The paper has no KL term beside it. Departures:

     1. Reconstructed from other implementations' accounts, which differ in how the entropy is normalised: here by ln V.
    """
    score = (tokens.measure.double() / temperature).where(tokens.scored, -torch.inf)
    return (score.softmax(1) * tokens.scored.sum(1, keepdim=True))[tokens.scored]


def _groups(tokens: Tokens) -> tuple[int, Tensor]:
    """Return the number of groups, and the number (N,) of the group of each scored token."""
    each, number = tokens.group.unique(return_inverse=True)
    return len(each), number[:, None].expand(tokens.scored.shape)[tokens.scored]


def _means(values: Tensor, place: Tensor, count: int) -> Tensor:
    """Return the mean (count,) of the values (N,) of each place (N,); NaN for a place without one."""
    sums, counts = (values.new_zeros(count).scatter_add_(0, place, each) for each in (values, torch.ones_like(values)))
    return sums / counts


class Shape(Strict):
    """Weights of tokens within an optimizer step."""

    rule: Literal["confident", "uncertain", "conflict", "largest", "pivotal", "divergent", "departed"]
    """confident: steps of low entropy weigh more (EMPG, arXiv 2509.09265); uncertain: tokens of low entropy weigh less
    (HAPO, arXiv 2509.16591); conflict: tokens that good and bad answers share are only raised (GTPO, arXiv 2508.03772);
    largest: only tokens of large |A| times entropy weigh (D3S, arXiv 2509.22115); pivotal: tokens of high entropy weigh more
    (ERPO, arXiv 2603.28204); divergent: places where the answers of a group predict differently weigh more (TW-GRPO, arXiv
    2505.24718); departed: uncertain tokens whose prediction has left the reference weigh more (DGPO, arXiv 2605.03327)."""
    sharpness: Positive = 1.0
    """With confident, the least entropy weighs e^sharpness as much as the largest."""
    quantile: Rate = 0.8
    """With uncertain, the quantile of the logarithm of entropies from which tokens weigh alike."""
    share: float = Field(0.2, gt=0, le=1)
    """With largest, the share of tokens that weigh."""
    end: float | None = Field(None, gt=0, le=1)
    """With largest, the share at the end of training, to which it moves linearly; null: it stays."""
    slope: Positive = 5.0
    """With pivotal, the slope of the sigmoid in standard deviations of the entropy."""
    alpha: float = Field(1.7, ge=1)
    """With divergent, the largest weight; the least is 1."""
    temperature: Positive = 0.5
    """With departed, of the softmax over the tokens of an answer."""

    @model_validator(mode="after")
    def _used(self) -> Shape:
        for key, rule in OPTIONS.items():
            if self.rule != rule and getattr(self, key) != type(self).model_fields[key].default:
                raise InputError(f"algorithm.aggregation.shape.{key}: {self.rule} has none, take rule={rule}")
        return self

    @property
    def measure(self) -> Literal["entropy", "group_spread", "gated_distances"] | None:
        """Return the number of a token's prediction that the rule uses; None if it uses none."""
        named: dict[str, Any] = {"conflict": None, "divergent": "group_spread", "departed": "gated_distances"}
        return named.get(self.rule, "entropy")

    def at(self, done: float) -> Shape:
        """Return the shape with its `share` when the part `done` (0 to 1) of the iterations is done."""
        return (
            self if self.end is None else self.model_copy(update={"share": self.share + done * (self.end - self.share)})
        )

    def weights(self, tokens: Tokens) -> Tensor:
        """Return the weights (B, L) of all tokens of an optimizer step: of mean 1 over the scored ones, 1 elsewhere."""
        if not tokens.scored.any():
            return torch.ones(tokens.scored.shape)
        match self.rule:
            case "confident":
                weights = confident(tokens, self.sharpness)
            case "uncertain":
                weights = uncertain(tokens, self.quantile)
            case "conflict":
                weights = conflict(tokens)
            case "largest":
                weights = largest(tokens, self.share)
            case "pivotal":
                weights = pivotal(tokens, self.slope)
            case "divergent":
                weights = divergent(tokens, self.alpha)
            case "departed":
                weights = departed(tokens, self.temperature)
        return torch.ones(tokens.scored.shape).masked_scatter(tokens.scored, (weights / weights.mean()).float())


def shape_tokens(shape: Shape, tokens: Tokens, gather: Gather, rank: int) -> Tensor:
    """Return the weights (B, L) of this process's tokens, of mean 1 over all processes.

    A collective call; for `gather` and `rank` see `gather_rows`.
    """
    every, own = gather_rows(vars(tokens), gather, rank)
    return shape.weights(Tokens(**every))[own].to(tokens.measure.device)
