"""Likelihoods: the masked copies of an answer that estimate its log-probability, and their weights.

Every published estimator is a weighted set of views. A view hides some tokens, the model predicts all of them at once, and
the log-probability of some of them, l_i(view) below, is scored. One function per estimator builds the views of a batch.

 - L is the number of scored tokens of a row.
 - Views with random masks hide every token that is not scored: one behind an EOS would show the model where the answer
   ends. So the result is a likelihood of the scored tokens alone. A given token (`Answers.given`) is seen in all
   views, like the prompt.
 - Masks are drawn at a row's address, for its own tokens: they do not depend on its batch, its padding or the process.
 - The ELBO is the mean, over k ~ U{1..L} and random sets of k tokens, of (L / k) times the sum of l_i over the set. It is
   also the mean, over all orders of the tokens, of the exact log-probability of decoding in that order.
 - A block-causal model predicts each block from its view and the finished earlier blocks (`Answers.block_size`). Its
   likelihood is a sum over blocks. Every estimator here estimates that sum, because a random set or order of the answer is
   also a random set or order of each block. A view of one step in an order scores that step in every block.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import replace
from typing import Literal

from typing_extensions import override

from flowgrpo.mdlm.decoding.decode import Decoder
from flowgrpo.mdlm.methods.likelihoods.answers import Answers, Scope
from flowgrpo.mdlm.methods.likelihoods.masked_views import (
    Views,
    finished,
    hide_prompt,
    nothing_scored,
    score,
    scored_rows,
)
from flowgrpo.schema.base import Choice, Count, Rate, named
from flowgrpo.schema.imports.heavy import np, torch


class Likelihood(Choice):
    """Options of every likelihood."""

    scope: Scope = "eos"
    """Tokens whose likelihood is estimated: eos, up to and with the first end token; canvas, all."""

    @property
    def fixed(self) -> bool:
        """True if the views are the same in every pass."""
        return False

    @property
    def by_branch(self) -> bool:
        """True if the steps of answers are the branches of their tree (see `Answers.steps`)."""
        return False

    def recorded(self, decoder: Decoder) -> bool:
        """Return whether the views give the log-probabilities that the decoder recorded (same canvases and distribution)."""
        return False

    @abstractmethod
    def views(self, answers: Answers) -> Views:
        """Build the views of some answers; raises ValueError if the views follow steps and the answers have none."""


def one_step(answers: Answers, prompt_rate: float = 0.15) -> Views:
    """diffu-GRPO (arXiv 2504.12216): hide the whole answer, and each prompt token with probability `prompt_rate`.

    The estimate is sum_i l_i, as if tokens were independent given the prompt. It takes one evaluation, but is biased and no
    ELBO. The paper draws a new mask for each update on the same answers: put the update's number into the addresses.
    """
    hidden, weight = nothing_scored(answers, 1)
    hidden[:, :, answers.prompt_length :] = True
    for row, random, positions in scored_rows(answers, "one_step"):
        score(hidden, weight, (0, row, positions), 1.0)
        hide_prompt(answers, hidden, view=0, row=row, random=random, rate=prompt_rate)
    return finished(answers, hidden, weight)


class OneStep(Likelihood):
    """The whole answer hidden, in one view (diffu-GRPO)."""

    name: Literal["one_step"] = "one_step"
    prompt_rate: Rate = 0.15
    """Probability that a token of the prompt is hidden too."""

    @property
    @override
    def fixed(self) -> bool:
        return self.prompt_rate == 0

    @override
    def views(self, answers: Answers) -> Views:
        return one_step(answers, self.prompt_rate)


def coupled_as_released(answers: Answers, low: float = 0.2, high: float = 0.8) -> Views:
    """coupled-GRPO's code (DiffuCoder, arXiv 2506.20639): three views hide the whole answer, a random set, and the rest.

    A token is in the set with probability r ~ U(low, high). Its estimate is (l_i(whole) + l_i(set) / r) / 2 in the set, and
    (l_i(whole) + l_i(rest) / (1 - r)) / 2 outside. The expected weight of a token is 1/2 + 1 = 1.5, so ratios are inflated;
    `coupled` has unbiased weights.
    """
    hidden, weight = nothing_scored(answers, 3)
    for row, random, positions in scored_rows(answers, "coupled"):
        rate = random.uniform(low, high)
        inside = random.random(len(positions)) < rate
        score(hidden, weight, (0, row, positions), 0.5)
        score(hidden, weight, (1, row, positions[inside]), 0.5 / rate)
        score(hidden, weight, (2, row, positions[~inside]), 0.5 / (1 - rate))
    return finished(answers, hidden, weight)


def coupled(answers: Answers) -> Views:
    """Three views as in `coupled_as_released`, weighted so that they estimate the ELBO without bias (ours).

    For k ~ U{1..L-1}: sum_i l_i(whole) / L + (L - 1) / 2 (sum of l_i(set of k) / k + sum of l_i(rest) / (L - k)). The first
    view is the term k = L of the ELBO; k and L - k have the same distribution.
    """
    hidden, weight = nothing_scored(answers, 3)
    for row, random, positions in scored_rows(answers, "coupled"):
        length = len(positions)
        score(hidden, weight, (0, row, positions), 1 / length)
        if length > 1:
            k = int(random.integers(1, length))
            order = random.permutation(positions)
            score(hidden, weight, (1, row, order[:k]), (length - 1) / (2 * k))
            score(hidden, weight, (2, row, order[k:]), (length - 1) / (2 * (length - k)))
    return finished(answers, hidden, weight)


class Coupled(Likelihood):
    """Three views hide the whole answer, a random part of it, and the rest (coupled-GRPO, arXiv 2506.20639)."""

    name: Literal["coupled"] = "coupled"
    weights: Literal["released", "unbiased"] = "released"
    """Weights of the three views: released (tokens weigh 1.5 in the mean, which inflates ratios) or unbiased (the ELBO)."""

    @override
    def views(self, answers: Answers) -> Views:
        return coupled_as_released(answers) if self.weights == "released" else coupled(answers)


def bernoulli(answers: Answers, draws: int = 1, stratified: bool = False, antithetic: bool = False) -> Views:
    """Monte Carlo ELBO: t ~ U(0, 1), each token hidden with probability t, weight 1 / t, mean over `draws`.

    Unbiased, but with by far the largest variance, since a small t gives hidden tokens a large weight. See `exact_k`.
    `stratified` takes t_j = (j + u) / draws, one u for all. `antithetic` gives each draw a second view, which hides the
    complement, with rate 1 - t.
    """
    sides = 2 if antithetic else 1
    hidden, weight = nothing_scored(answers, sides * draws)
    for row, random, positions in scored_rows(answers, "bernoulli"):
        rates = (np.arange(draws) + random.random()) / draws if stratified else random.random(draws)
        for draw, rate in enumerate(1 - rates):  # in (0, 1]
            inside = random.random(len(positions)) < rate
            score(hidden, weight, (sides * draw, row, positions[inside]), 1 / (sides * draws * rate))
            if antithetic:
                score(hidden, weight, (sides * draw + 1, row, positions[~inside]), _inverse(sides * draws * (1 - rate)))
    return finished(answers, hidden, weight)


def exact_k(answers: Answers, draws: int = 1, stratified: bool = False, antithetic: bool = False) -> Views:
    """Monte Carlo ELBO with k ~ U{1..L} hidden tokens, weight L / k, mean over `draws`. Unbiased.

    Args:
        stratified: k_j = k_0 + floor(j L / draws), wrapped into 1..L. Like LLaDA's evaluation and VRPO's estimator (arXiv
            2505.19223: as many k as draws, a mask for each), which instead round j L / draws + k_0 to even, so that some k
            are a little likelier. They are equal if the draws divide L.
        antithetic: ESPO's pairs (arXiv 2512.03759): k ~ U{0..L}, the set at weight (L + 1) / k and its complement at
            (L + 1) / (L - k), halved. For k = 0 or L one of the two is empty, and half of the sum is missing; pairs of
            `coupled` are never empty.
    """
    sides, lowest = (2, 0) if antithetic else (1, 1)
    hidden, weight = nothing_scored(answers, sides * draws)
    for row, random, positions in scored_rows(answers, "exact_k"):
        length = len(positions)
        choices = length + 1 - lowest
        counts = random.integers(choices, size=1 if stratified else draws)
        if stratified:
            counts = (counts + np.arange(draws) * choices // draws) % choices
        for draw, k in enumerate((counts + lowest).tolist()):
            order = random.permutation(positions)
            score(hidden, weight, (sides * draw, row, order[:k]), _inverse(sides * draws * k / choices))
            if antithetic:
                complement = _inverse(sides * draws * (length - k) / choices)
                score(hidden, weight, (sides * draw + 1, row, order[k:]), complement)
    return finished(answers, hidden, weight)


class MonteCarlo(Likelihood):
    """The ELBO from random masks; with antithetic pairs that of ESPO (arXiv 2512.03759)."""

    name: Literal["monte_carlo"] = "monte_carlo"
    masks: Literal["bernoulli", "exact_k"] = "exact_k"
    """bernoulli hides each token with a random probability; exact_k hides a random number of tokens."""
    draws: Count = 2
    """Random masks of an answer."""
    stratified: bool = False
    """Spread the rates or numbers of the draws evenly."""
    antithetic: bool = False
    """Give each draw a second view, which hides the complement."""

    @override
    def views(self, answers: Answers) -> Views:
        plan = bernoulli if self.masks == "bernoulli" else exact_k
        return plan(answers, self.draws, self.stratified, self.antithetic)


def gauss_legendre(nodes: int) -> tuple[list[float], list[float]]:
    """Return the nodes in (0, 1) and their weights, which sum to 1; exact for polynomials up to degree 2 nodes - 1."""
    points, weights = np.polynomial.legendre.leggauss(nodes)
    return ((points + 1) / 2).tolist(), (weights / 2).tolist()


def quadrature(
    answers: Answers, nodes: int = 3, draws: int = 1, masks: Literal["floor", "centred", "bernoulli"] = "floor"
) -> Views:
    """GDPO (arXiv 2510.08554): the ELBO's integral over t at Gauss-Legendre nodes, `draws` random masks at each.

    `masks` sets how many tokens a node t hides:

     - `floor`: k = max(1, floor(t L)), as released, but with weight w L / k: the paper's w / t is wrong by the factor
       k / (t L), up to a half at L = 6. It is still biased: in the ELBO's k ~ U{1..L} a node t stands for t L + 1/2 tokens,
       so `floor` hides about one too few. If tokens inform each other, this changes the estimate by about 2 / L.
     - `centred` (ours): k = floor(t L + 1/2 + u), u ~ U(0, 1), within 1..L, with weight w L / k. Exact if the sum over
       hidden tokens is linear in k, except at the ends; otherwise nearly so.
     - `bernoulli`: each token with probability t, with weight w / t. If 2 nodes >= L the mean is the ELBO, because the
       integrand is a polynomial of degree L - 1. The variance is larger.
    """
    times, shares = gauss_legendre(nodes)
    hidden, weight = nothing_scored(answers, nodes * draws)
    for row, random, positions in scored_rows(answers, "quadrature"):
        length = len(positions)
        for view in range(nodes * draws):
            time, share = times[view // draws], shares[view // draws] / draws
            if masks == "bernoulli":
                score(hidden, weight, (view, row, positions[random.random(length) < time]), share / time)
                continue
            # 1e-9, because a whole t L may be rounded down.
            shift = 0.5 + random.random() if masks == "centred" else 1e-9
            k = min(max(math.floor(time * length + shift), 1), length)
            score(hidden, weight, (view, row, random.permutation(positions)[:k]), share * length / k)
    return finished(answers, hidden, weight, np.repeat(shares, draws) / draws)


class Quadrature(Likelihood):
    """The ELBO by Gauss-Legendre quadrature over the mask rate (GDPO)."""

    name: Literal["quadrature"] = "quadrature"
    nodes: Count = 3
    """Number of mask rates at which the integral is evaluated."""
    draws: Count = 1
    """Number of random masks at each node."""
    masks: Literal["floor", "centred", "bernoulli"] = "floor"
    """How many tokens a node hides: floor, one too few (released); centred, without that bias (ours); bernoulli, a random
    number."""

    @override
    def views(self, answers: Answers) -> Views:
        return quadrature(answers, self.nodes, self.draws, self.masks)


def autoregressive(answers: Answers) -> Views:
    """JustGRPO (arXiv 2601.15165): L views, each scoring one token, with the earlier tokens shown and the later ones hidden.

    The sum is the exact log-probability of decoding from left to right. A block-causal model needs only as
    many views as a block has tokens.
    """
    order = torch.arange(answers.scored.shape[1], device=answers.ids.device).expand_as(answers.scored)
    return trajectory(replace(answers, steps=order.where(~answers.given, -1)))


class Autoregressive(Likelihood):
    """One view for each token; exact for decoding from left to right (JustGRPO)."""

    name: Literal["autoregressive"] = "autoregressive"

    @property
    @override
    def fixed(self) -> bool:
        return True

    @override
    def views(self, answers: Answers) -> Views:
        return autoregressive(answers)


def trajectory(answers: Answers, shrink: int = 1) -> Views:
    """CJ-GRPO (arXiv 2509.23924): score each token where the decoder committed it, with all later tokens hidden.

    With `shrink` 1 this is the exact log-probability, given the order, of a decoder that never masks a token again and
    draws all tokens of a step at once. TraceRL (arXiv 2509.06949) merges every `shrink` steps of a row into one, whose
    tokens are hidden and scored together. A token of step -1 is never scored. In a block-causal model steps are counted and
    merged per block, as in TraceRL's code for SDAR. Raises ValueError if the answers have no steps.
    """
    if answers.steps is None:
        raise ValueError("a trajectory needs the steps at which tokens were committed")
    steps, scored = answers.steps.cpu(), answers.scored.cpu() & (answers.steps.cpu() >= 0)
    rank = torch.full_like(steps, -1)
    numbers = torch.zeros_like(steps) if answers.blocks is None else answers.blocks.cpu()
    for row in range(len(steps)):
        for block in numbers[row].unique():
            free = (numbers[row] == block) & (steps[row] >= 0)
            rank[row, free] = steps[row, free].unique(return_inverse=True)[1] // shrink
    count = int(rank[scored].max()) + 1 if scored.any() else 1
    view = torch.arange(count)[:, None, None]
    hidden = torch.zeros(count, *answers.ids.shape, dtype=torch.bool)
    hidden[:, :, answers.prompt_length :] = rank >= view
    return finished(answers, hidden.numpy(), ((rank == view) & scored).float().numpy())


class Trajectory(Likelihood):
    """Each token on the canvas on which the decoder committed it (CJ-GRPO)."""

    name: Literal["trajectory"] = "trajectory"
    shrink: Count | Literal["branch"] = 1
    """Number of consecutive decoder steps that are merged into one (TraceRL); branch: all between two splits of a tree
    (d-TreeRPO, arXiv 2512.09675)."""

    @property
    @override
    def fixed(self) -> bool:
        return True

    @property
    @override
    def by_branch(self) -> bool:
        return self.shrink == "branch"

    @override
    def recorded(self, decoder: Decoder) -> bool:
        return self.shrink == 1 and decoder.recorded

    @override
    def views(self, answers: Answers) -> Views:
        return trajectory(answers, 1 if self.by_branch else int(self.shrink))


def blocks(answers: Answers, size: int = 32, draws: int = 2, prompt_rate: float = 0.15) -> Views:
    """SPG's views (arXiv 2510.09541 and its code): part of a block, all later blocks, and some earlier tokens are hidden.

    Each view has its own block of the canvas: the blocks are shuffled, and used again only after all were used. If the
    answer has only n blocks, number b stands for block b mod n. Of the block's m scored tokens k ~ U{1..m} are hidden.
    All tokens behind the block are hidden, and each one before it, of prompt and answer, with probability `prompt_rate`,
    drawn anew for each view. Every hidden token of the answer is scored, with weight L / (number of scored tokens * draws).
    So the sum divided by L is the mean over views of a view's mean l, and `objective.Sandwich` has the bounds of the code.
    In the mean over full blocks a view scores (m + 1 + (n - 1) m (1 + prompt_rate)) / (2 n m) of the answer: 0.568 of 256
    tokens, (1 + prompt_rate) / 2 in the limit of many blocks.

    This is no ELBO: late tokens are hidden more often than early ones, and so weigh more.
    """
    hidden, weight = nothing_scored(answers, draws)
    count = math.ceil(answers.scored.shape[1] / size)
    for row, random, positions in scored_rows(answers, "blocks"):
        parts = [positions[positions // size == block] for block in np.unique(positions // size)]
        order = np.concatenate([random.permutation(count) for _ in range(math.ceil(draws / count))])
        for view, block in enumerate(order[:draws] % len(parts)):
            part = parts[block]
            before, behind = positions[positions < part[0]], positions[positions > part[-1]]
            perturbed = before[random.random(len(before)) < prompt_rate]
            chosen = random.permutation(part)[: int(random.integers(1, len(part) + 1))]
            scored = np.concatenate([perturbed, chosen, behind])
            score(hidden, weight, (view, row, scored), len(positions) / (len(scored) * draws))
            hide_prompt(answers, hidden, view=view, row=row, random=random, rate=prompt_rate)
    return finished(answers, hidden, weight)


class Blocks(Likelihood):
    """A random part of a random block, all blocks after it, and some tokens before it (SPG)."""

    name: Literal["blocks"] = "blocks"
    size: Count = 32
    """Tokens of a block."""
    draws: Count = 2
    """Views of an answer, each of another block until all blocks were used."""
    prompt_rate: Rate = 0.15
    """Probability that a token before the block, of prompt or answer, is hidden."""

    @override
    def views(self, answers: Answers) -> Views:
        return blocks(answers, self.size, self.draws, self.prompt_rate)


LIKELIHOODS = named(OneStep, Coupled, MonteCarlo, Quadrature, Autoregressive, Trajectory, Blocks)


def _inverse(value: float) -> float:
    """Return 1 / value, or 0 for 0, which is the weight of an empty set."""
    return 1 / value if value else 0.0
