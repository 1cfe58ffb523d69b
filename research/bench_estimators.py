"""Measure the estimators of masked-diffusion likelihoods on a tiny model: bias, spread, model evaluations and memory.

    python research/bench_estimators.py [--length 12] [--draws 4000] [--answers 4] [--steps 1500]

Trains a bidirectional transformer for some seconds on sequences of random digits d, followed by 3 d + 1 mod 10 of each.
Then it enumerates all masks of a few answers, and computes the exact ELBO from their log-probabilities. Prints two
tables in Markdown: the estimators, and ways to compute the gradient of one answer with many views. Memory is that of
tensors saved for the backward pass. Numbers are means over the answers.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from dataclasses import dataclass
from functools import partial
from itertools import combinations

import torch
from torch import nn

from flowgrpo.mdlm.methods.backward import backward
from flowgrpo.mdlm.methods.likelihoods import likelihood, masked_views
from flowgrpo.mdlm.methods.likelihoods.answers import Answers
from flowgrpo.mdlm.methods.likelihoods.estimate import estimate
from flowgrpo.mdlm.methods.objectives import aggregation
from flowgrpo.mdlm.methods.objectives.bounds import LinearBound
from flowgrpo.mdlm.methods.objectives.objective import Objective, SequenceRatio
from flowgrpo.training.fitting.saved_tensor_meter import SavedTensorMeter

MASK, START, VOCABULARY = 10, 11, 12
PLANS = {
    "one step, prompt kept": partial(likelihood.one_step, prompt_rate=0.0),
    "coupled, weights as released": likelihood.coupled_as_released,
    "coupled, unbiased": likelihood.coupled,
    "Bernoulli, 1 draw": likelihood.bernoulli,
    "Bernoulli, 4 draws": partial(likelihood.bernoulli, draws=4),
    "Bernoulli, 4 stratified": partial(likelihood.bernoulli, draws=4, stratified=True),
    "Bernoulli, 2 antithetic pairs": partial(likelihood.bernoulli, draws=2, antithetic=True),
    "exact k, 1 draw": likelihood.exact_k,
    "exact k, 4 draws": partial(likelihood.exact_k, draws=4),
    "exact k, 4 stratified": partial(likelihood.exact_k, draws=4, stratified=True),
    "exact k, 2 antithetic pairs": partial(likelihood.exact_k, draws=2, antithetic=True),
    "quadrature, 2 nodes": partial(likelihood.quadrature, nodes=2),
    "quadrature, 3 nodes": likelihood.quadrature,
    "quadrature, 4 nodes": partial(likelihood.quadrature, nodes=4),
    "quadrature, 2 nodes, centred": partial(likelihood.quadrature, nodes=2, masks="centred"),
    "quadrature, 3 nodes, centred": partial(likelihood.quadrature, masks="centred"),
    "quadrature, 3 nodes, Bernoulli": partial(likelihood.quadrature, masks="bernoulli"),
    "blocks of 4 as in SPG, 2 draws": partial(likelihood.blocks, size=4),
    "trajectory, random order": likelihood.trajectory,
    "trajectory, shrunk by 4": partial(likelihood.trajectory, shrink=4),
    "autoregressive": likelihood.autoregressive,
}


class Tiny(nn.Module):
    """A bidirectional transformer of two layers with the interface of a predictor."""

    mask_id = MASK

    def __init__(self, length: int, width: int = 64):
        super().__init__()
        self.token, self.place = nn.Embedding(VOCABULARY, width), nn.Embedding(length + 1, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCABULARY)
        self.evaluations = 0

    def logits(self, ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Return logits (B, T, V)."""
        self.evaluations += len(ids)
        x = self.token(ids) + self.place(torch.arange(ids.shape[1]))
        x = self.layers(x, src_key_padding_mask=~attention_mask if not attention_mask.all() else None)
        return self.head(x).masked_fill(torch.arange(VOCABULARY) == MASK, -math.inf)

    def logits_at(self, ids: torch.Tensor, attention_mask: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
        """Return logits (N, V) of the tokens `where`."""
        return self.logits(ids, attention_mask)[where]


@dataclass(frozen=True)
class Table:
    """A predictor that looks up the log-probabilities of all masks of one answer.

    Attributes:
        rows: (2^L, L, V) log-probabilities; bit i of the row number says whether place i is masked.
    """

    rows: torch.Tensor
    mask_id: int = MASK
    evaluations: int = 0

    def logits_at(self, ids: torch.Tensor, attention_mask: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
        """Return logits (N, V) of the tokens `where`, none of them in the prompt."""
        return self.rows[((ids[:, 1:] == MASK) * 2 ** torch.arange(ids.shape[1] - 1)).sum(1)][where[:, 1:]]


def sequences(count: int, length: int, random: torch.Generator) -> torch.Tensor:
    """Return sequences (count, 1 + length): a start token, random digits d, and 3 d + 1 mod 10 of each."""
    digits = torch.randint(10, (count, length // 2), generator=random)
    start = torch.full((count, 1), START)
    return torch.cat([start, digits, (3 * digits + 1) % 10], dim=1)


def trained(length: int, steps: int) -> Tiny:
    """Return a model that has partly learnt the sequences."""
    torch.manual_seed(0)
    random = torch.Generator().manual_seed(1)
    model = Tiny(length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(steps):
        ids = sequences(64, length, random)
        given = whole(ids, ("train",))
        k = torch.randint(1, length + 1, (64, 1), generator=random)
        chosen = torch.rand(64, length, generator=random).argsort(1).argsort(1) < k
        seen = torch.where(torch.cat([torch.zeros(64, 1, dtype=torch.bool), chosen], 1), MASK, ids)
        table = model.logits(seen, given.attention_mask)[:, 1:].log_softmax(-1)
        loss = -(table.gather(-1, ids[:, 1:, None])[..., 0] * chosen / k).sum() / 64
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def whole(ids: torch.Tensor, address: tuple) -> Answers:
    """Return answers that are scored on the whole canvas, each with a random order of decoding."""
    count, length = ids.shape[0], ids.shape[1] - 1
    random = torch.Generator().manual_seed(2)
    steps = torch.rand(count, length, generator=random).argsort(1)
    full = torch.ones_like(ids, dtype=torch.bool)
    return Answers(
        ids=ids, attention_mask=full, scored=full[:, 1:], addresses=[(*address, i) for i in range(count)], steps=steps
    )


def enumerated(model: Tiny, ids: torch.Tensor) -> tuple[Table, float]:
    """Return a table of all masks of one answer (1, 1 + L), and its exact ELBO."""
    length = ids.shape[1] - 1
    hidden = (torch.arange(2**length)[:, None] >> torch.arange(length) & 1).bool()
    seen = torch.cat([ids[:, :1].expand(len(hidden), 1), torch.where(hidden, MASK, ids[:, 1:])], dim=1)
    with torch.no_grad():
        logits = torch.cat([model.logits(part, torch.ones_like(part, dtype=torch.bool)) for part in seen.split(1024)])
    log_probs = logits[:, 1:].double().log_softmax(-1)
    of_answer = log_probs.gather(-1, ids[:, 1:, None].expand(len(hidden), -1, 1))[..., 0]
    elbo = 0.0
    for k in range(1, length + 1):
        places = [sum(1 << i for i in chosen) for chosen in combinations(range(length), k)]
        elbo += float((of_answer[places] * hidden[places]).sum(1).mean()) / k
    return Table(log_probs), elbo


def _backward(
    model: Tiny,
    given: Answers,
    chosen: masked_views.Views,
    objective: Objective,
    *,
    advantage: float,
    weights: torch.Tensor,
    old: torch.Tensor | None,
    micro_batch: int,
) -> None:
    """Add the gradient of an objective on one answer."""
    nothing = torch.zeros(1, dtype=torch.long)
    backward(
        model,
        given,
        chosen,
        objective=objective,
        advantage=torch.tensor([advantage]),
        group=nothing,
        rank=nothing.float(),
        token_weight=weights,
        old=old,
        reference=None,
        micro_batch=micro_batch,
    )


def kept(model: Tiny, given: Answers, chosen: masked_views.Views, micro_batch: int) -> int:
    """Return the bytes saved for the exact gradient of one answer's ratio with `micro_batch` views per call."""
    weights = aggregation.sequence_mean(given.scored, torch.ones(1), chosen.first)
    with SavedTensorMeter(model.parameters()) as meter:
        _backward(
            model, given, chosen, SequenceRatio(), advantage=1.0, weights=weights, old=None, micro_batch=micro_batch
        )
    return meter.peak


def estimators(model: Tiny, held_out: torch.Tensor, draws: int) -> None:
    """Print the table of the estimators."""
    tables = [(ids[None], *enumerated(model, ids[None])) for ids in held_out]
    elbo = statistics.mean(exact for *_, exact in tables)
    print(
        f"Exact ELBO {elbo:.3f}, mean of {len(tables)} answers of {held_out.shape[1] - 1} tokens; {draws} estimates.\n"
    )
    print(
        "| estimator | mean - ELBO | its error | sd | evaluations | sd x sqrt(evaluations) | one graph | by the call |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name, plan in PLANS.items():
        biases, deviations, errors, count = [], [], [], 0.0
        for number, (ids, table, exact) in enumerate(tables):
            many = whole(ids.expand(draws, -1), (name, number))
            made = plan(many)
            found = estimate(table, many, made, 8192).seq
            count = float(made.scored.any(2).sum()) / draws
            biases.append(float(found.mean()) - exact)
            deviations.append(float(found.std()))
            errors.append(deviations[-1] / math.sqrt(draws))
        spread = statistics.mean(deviations)
        error = math.sqrt(sum(e**2 for e in errors)) / len(errors)
        one = whole(tables[0][0], ("memory",))
        graph, call = (kept(model, one, plan(one), size) / 1024 for size in (10**6, 1))
        cells = [f"{statistics.mean(biases):+.3f}", f"{error:.3f}", f"{spread:.2f}", f"{count:.1f}"]
        cells += [f"{spread * math.sqrt(count):.2f}", f"{graph:.0f} KiB", f"{call:.0f} KiB"]
        print("| " + " | ".join([name, *cells]) + " |")


def gradients(model: Tiny, held_out: torch.Tensor, draws: int) -> None:
    """Print the table of ways to compute the gradient of one answer's ratio, after the policy has moved by a step."""
    given = whole(held_out[:1], ("gradients",))
    chosen = likelihood.exact_k(given, draws=draws)
    old = estimate(model, given, chosen, 1).each
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3))
    print(
        f"\n| way, {draws} views | A | evaluations | without gradient | kept | cosine to the exact gradient | its size |"
    )
    print("|---|---|---|---|---|---|---|")
    for advantage in (1.0, -1.0):
        exact = None
        for name, objective, size in (
            ("one graph", SequenceRatio(clip_range=9.0), 10**6),
            ("two passes", SequenceRatio(clip_range=9.0), 1),
            ("BGPO's bound", LinearBound(), 1),
        ):
            model.zero_grad()
            before = model.evaluations
            value = torch.tensor([advantage])
            weights = aggregation.sequence_mean(given.scored, value, chosen.first)
            with SavedTensorMeter(model.parameters()) as meter:
                _backward(
                    model, given, chosen, objective, advantage=advantage, weights=weights, old=old, micro_batch=size
                )
            calls = model.evaluations - before
            slope = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
            exact = slope if exact is None else exact
            cosine = torch.nn.functional.cosine_similarity(slope, exact, dim=0).item()
            cells = [f"{advantage:+.0f}", calls, calls - draws, f"{meter.peak / 1024:.0f} KiB", f"{cosine:.6f}"]
            print("| " + " | ".join(map(str, [name, *cells, f"{float(slope.norm() / exact.norm()):.4f}"])) + " |")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=12, help="even, and 2^length masks are enumerated")
    parser.add_argument("--draws", type=int, default=4000)
    parser.add_argument("--answers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--views", type=int, default=16)
    options = parser.parse_args()
    if options.length % 2 or not 4 <= options.length <= 16:
        sys.exit("--length: an even number from 4 to 16")
    model = trained(options.length, options.steps)
    held_out = sequences(options.answers, options.length, torch.Generator().manual_seed(9))
    estimators(model, held_out, options.draws)
    gradients(model, held_out, options.views)


if __name__ == "__main__":
    main()
