"""Search at sampling time: candidates of a prompt are compared by rewards, and one of them becomes the sample.

Candidate 0 of a row starts from the row's seed, the others from addresses of that seed. Every random number has an
address in the row's seed, so the result of a row does not depend on the other rows or on the batch size.

 - `best-of-n`: ODE samples of all candidates; the one of highest reward is chosen.
 - `beam`: candidates take stochastic steps. At each comparison the `keep` best stay, and all candidates descend from them.
 - `smc`: sequential Monte Carlo (Feynman-Kac steering, arXiv 2501.06848), with the potentials
   exp((r_t - r_s) / temperature), where r_t is the reward of a candidate at this comparison and r_s at the one before,
   0 before the first. An unknown reward counts as the one before it, at first as the mean of the known ones of its row.
   The last r_t is that of the sample itself, so the potentials multiply to exp(r / temperature) whatever the estimates
   are worth. Candidates are resampled systematically if their effective number is below half of them.

A comparison scores the model's clean estimates x - sigma v, whose velocities the next steps use, so it costs no model
evaluation. Stochastic steps are those of a chain with the kernel `flow_sde` and an ODE step at the end.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from itertools import pairwise

import torch

from flowgrpo.data.prompts import Row
from flowgrpo.errors import InputError
from flowgrpo.flow.pipeline.policy import Policy
from flowgrpo.flow.rollouts.rollout import edge_noise
from flowgrpo.training.advantages.baseline import GroupMean
from flowgrpo.training.advantages.reward_combination import Combination
from flowgrpo.training.distributed.data_shard import WHOLE, DataShard
from flowgrpo.training.reports.samples import Sample, SearchUse
from flowgrpo.training.scoring.group_scores import Piece, score_pieces
from rewards import Reward
from rewards.audio import Films, join_samples
from samplers import noise
from samplers.batches import batched
from samplers.drawing import to_device
from samplers.kernels import ODE, Kernel, State, transition

Tensor = torch.Tensor


@dataclass(frozen=True)
class Candidates:
    """The N finished candidates of a row.

    Attributes:
        rows: the row with the seed of the start that each candidate grew from.
        states: final states (N, ...) if the candidates took steps one by one, so not for best-of-n; else None.
        samples: decoded samples, in a batch.
        rewards: (N, R) float64, NaN where a reward does not apply or was lost.
        totals: (N,) float64, weighted sums of the rewards; NaN where no reward is known.
        log_weights: (N,) float64. The mean of f, weighted by their softmax, estimates the mean of f under the sampler's
            law times exp(reward / temperature). Equal weights except for smc.
        log_constant: log of the unbiased estimate of E[exp(reward / temperature)] under the sampler's law; 0 except for smc.
    """

    rows: Sequence[Row]
    samples: Tensor | Films
    rewards: Tensor
    totals: Tensor
    _: KW_ONLY
    states: State | None
    log_weights: Tensor
    log_constant: float


@dataclass
class _Walkers:
    """The candidates of `row` while they walk; `paths` are the paths of tree nodes, `estimates` their last rewards."""

    row: Row
    rows: list[Row]  # with the seeds of their starts
    _: KW_ONLY
    paths: list[tuple[int, ...]]
    estimates: Tensor  # (N,), NaN before any is known
    log_weights: Tensor
    log_constant: float = 0.0

    def take(self, parents: Sequence[int]) -> None:
        """Replace the candidates by children of `parents`; siblings extend their parent's path by their ordinals."""
        counts = [parents.count(parent) for parent in parents]
        ordinals = [parents[:place].count(parent) for place, parent in enumerate(parents)]
        self.paths = [
            (*self.paths[parent], ordinal) if count > 1 else self.paths[parent]
            for parent, ordinal, count in zip(parents, ordinals, counts, strict=True)
        ]
        self.rows = [self.rows[parent] for parent in parents]
        self.estimates = self.estimates[list(parents)]

    def weigh(self, totals: Tensor, temperature: float) -> None:
        """Multiply the weights by the potentials of new rewards (N,).

        An unknown reward (NaN) counts as the one before it, at first as the mean of the known ones.
        """
        before = self.estimates.where(self.estimates.isfinite(), totals.nanmean())
        known = totals.where(totals.isfinite(), before)
        self.log_weights = self.log_weights + (known.nan_to_num() - self.estimates.nan_to_num()) / temperature
        self.estimates = known

    def close_weights(self) -> None:
        """Move the mean of the weights into the constant."""
        self.log_constant += float(self.log_weights.logsumexp(0)) - math.log(len(self.log_weights))


class Searcher:
    """Search by a policy; `batch_size` candidates share a call of the model. For `shard` see `score_pieces`.

    Attributes:
        cost: model evaluations, decoded samples and reward calls so far; a call of a reward scores one sample, of
            those that it applies to.
        plain_cost: the same of plain samples of the same rows.
    """

    def __init__(
        self,
        policy: Policy,
        use: SearchUse,
        rewards: Sequence[Reward],
        batch_size: int,
        *,
        shard: DataShard = WHOLE,
    ):
        self._policy, self._use, self._rewards, self._batch_size = policy, use, rewards, batch_size
        self._shard = shard
        self._combination = Combination.of(rewards, GroupMean())
        self.cost = {"model_evaluations": 0, "decoded": 0, "reward_calls": 0}
        self.plain_cost = dict(self.cost)

    def search(self, rows: Sequence[Row]) -> list[Sample]:
        """Return the chosen sample of each row, with its rewards and the seed of the start that it grew from."""
        before = self._policy.evaluations
        found = [self._choose(row, each) for row, each in zip(rows, self.candidates(rows), strict=True)]
        evaluations = self._policy.evaluations - before
        self.cost["model_evaluations"] += evaluations
        self.plain_cost["model_evaluations"] += evaluations // self._use.width  # each candidate takes every step once
        self.plain_cost["decoded"] += len(rows)
        return found

    @torch.no_grad()
    def candidates(self, rows: Sequence[Row]) -> list[Candidates]:
        """Return the finished candidates of each row."""
        width, size = self._use.width, self._batch_size
        walkers = [_begin(row, width) for row in rows]
        final: State | None = None
        if self._use.name == "best-of-n":
            starts = [row for each in walkers for row in each.rows]
            samples = join_samples([self._policy.generate(batch) for batch in batched(starts, size)])
            parts = [samples[i * width : (i + 1) * width] for i in range(len(walkers))]
            self.cost["decoded"] += len(starts)
        else:
            final = self._walk(walkers)
            parts = list(self._decode(final, walkers))
        rewards, totals = self._score(parts, walkers)
        if self._use.temperature is not None:
            for each, total in zip(walkers, totals, strict=True):
                each.weigh(total, self._use.temperature)
                if total.isfinite().any():  # then a sample of unknown reward is not chosen
                    each.log_weights = each.log_weights.masked_fill(~total.isfinite(), -torch.inf)
                each.close_weights()
        return [
            Candidates(
                each.rows,
                part,
                reward,
                total,
                states=None if final is None else _rows_of(final, range(i * width, (i + 1) * width)),
                log_weights=each.log_weights,
                log_constant=each.log_constant,
            )
            for i, (each, part, reward, total) in enumerate(zip(walkers, parts, rewards, totals, strict=True))
        ]

    def _walk(self, walkers: Sequence[_Walkers]) -> State:
        """Take all steps of the schedule, with comparisons; return the final states of all candidates."""
        use, policy, width = self._use, self._policy, self._use.width
        rows = [row for each in walkers for row in each.rows]
        state = _join(policy.start(batch) for batch in batched(rows, self._batch_size))
        sigmas = policy.sigmas
        last = len(sigmas) - 2
        compared = compared_steps(use, last + 1)
        for step, (sigma, following) in enumerate(pairwise(sigmas)):
            rows = [row for each in walkers for row in each.rows]
            places = batched(range(len(rows)), self._batch_size)
            velocity = _join(
                policy.velocity(_rows_of(state, place), sigma, [rows[i] for i in place]) for place in places
            )
            if step in compared:
                clean = tuple((x - sigma * v.float()).to(x.dtype) for x, v in zip(state, velocity, strict=True))
                _, totals = self._score(self._decode(clean, walkers), walkers)
                parents = [
                    i * width + parent
                    for i, (each, total) in enumerate(zip(walkers, totals, strict=True))
                    for parent in self._select(each, total, step)
                ]
                state, velocity = _rows_of(state, parents), _rows_of(velocity, parents)
            kernel = Kernel("flow_sde", use.level) if step < last and use.level > 0 else ODE
            mean, std = transition(kernel, state, velocity, sigma, following, sigmas[1])
            if kernel.stochastic:
                mean = tuple(m + std * _draw(walkers, m, step, component) for component, m in enumerate(mean))
            state = tuple(new.to(old.dtype) for new, old in zip(mean, state, strict=True))
        return state

    def _select(self, walkers: _Walkers, totals: Tensor, step: int) -> list[int]:
        """Let the candidates of a row survive or die by their rewards; return the parent of each new one, sorted."""
        count = len(totals)
        if self._use.temperature is None:
            parents = keep_best(totals, self._use.keep)
        else:
            walkers.weigh(totals, self._use.temperature)
            if effective_number(walkers.log_weights) >= count / 2:
                return list(range(count))
            uniform = noise.generator(walkers.row.seed, "resample", step).random()
            parents = resample(walkers.log_weights, uniform)
            walkers.close_weights()
            walkers.log_weights = torch.zeros(count, dtype=torch.float64)
        walkers.take(parents)
        return parents

    def _choose(self, row: Row, found: Candidates) -> Sample:
        if self._use.temperature is None:
            chosen = int(found.totals.nan_to_num(-torch.inf).argmax())
        else:
            uniform = noise.generator(row.seed, "choose").random()
            shares = found.log_weights.softmax(0).cumsum(0)
            chosen = min(int((shares <= uniform).sum()), int(found.log_weights.isfinite().nonzero()[-1]))
        values = found.rewards[chosen].tolist()
        rewards = {
            reward.name: None if math.isnan(value) else value
            for reward, value in zip(self._rewards, values, strict=True)
        }
        return Sample(0, found.rows[chosen], rewards, found.samples[chosen])

    def _decode(self, state: State, walkers: Sequence[_Walkers]) -> Iterable[Tensor | Films]:
        """Yield the decoded states of each row's candidates."""
        for i, each in enumerate(walkers):
            width = len(each.rows)
            places = batched(range(width), self._batch_size)
            own = _rows_of(state, range(i * width, (i + 1) * width))
            self.cost["decoded"] += width
            yield join_samples(
                [self._policy.decode(_rows_of(own, place), [each.rows[j] for j in place]) for place in places]
            )

    def _score(self, parts: Iterable[Tensor | Films], walkers: Sequence[_Walkers]) -> tuple[Tensor, Tensor]:
        """Return rewards (rows, N, R) and their totals (rows, N); group-wise rewards compare the candidates of a row."""
        pieces = (
            Piece(i, range(len(each.rows)), part, each.rows)
            for i, (part, each) in enumerate(zip(parts, walkers, strict=True))
        )
        values = score_pieces(self._rewards, pieces, shard=self._shard).values
        rows = [row for each in walkers for row in each.rows]
        self.cost["reward_calls"] += sum(reward.applies(row.columns) for row in rows for reward in self._rewards)
        shape = (len(walkers), self._use.width)
        return values.reshape(*shape, -1), self._combination.total(values).reshape(shape)


def compared_steps(use: SearchUse, steps: int) -> set[int]:
    """Return the steps before which `beam` and `smc` compare candidates, of a schedule of `steps`, counted from 0.

    They are among steps 1 to `steps` - 2: before step 0 all starts are noise, and the last step has no noise of its own,
    so copies would stay equal. Raise InputError if there is no such step, unless `use` compares nowhere.
    """
    if steps < 3 and use.compare_at:
        raise InputError(
            f"num_inference_steps: {use.name} compares candidates between stochastic steps, {steps} steps have no place "
            "for it; take 3 or more, or best-of-n"
        )
    return {min(max(round(part * steps), 1), steps - 2) for part in use.compare_at}


def keep_best(totals: Tensor, keep: int) -> list[int]:
    """Return the parents of N candidates, sorted, if the `keep` best of rewards (N,) grow N / `keep` children each.

    If `keep` does not divide N, the better ones have one child more. The first of equal rewards is better, and unknown
    rewards (NaN) are worst.
    """
    order = totals.nan_to_num(-torch.inf).sort(descending=True, stable=True).indices[:keep].tolist()
    return sorted(order[i % keep] for i in range(len(totals)))


def effective_number(log_weights: Tensor) -> float:
    """Return (sum w)^2 / sum w^2 of weights w = exp(`log_weights`)."""
    return float((2 * log_weights.logsumexp(0) - (2 * log_weights).logsumexp(0)).exp())


def resample(log_weights: Tensor, uniform: float) -> list[int]:
    """Return the parents, sorted, of N candidates that are resampled systematically, with one `uniform` in [0, 1).

    A candidate of normalised weight w has N w children in expectation, and at least floor(N w).
    """
    count = len(log_weights)
    ends = log_weights.double().softmax(0).cumsum(0)
    ends[-1] = 1.0  # whatever was rounded
    points = (torch.arange(count, dtype=torch.float64) + uniform) / count
    return torch.searchsorted(ends, points, right=True).tolist()


def _begin(row: Row, width: int) -> _Walkers:
    others = [replace(row, seed=noise.seed(row.seed, "candidate", index)) for index in range(1, width)]
    unknown, even = (torch.full((width,), value, dtype=torch.float64) for value in (math.nan, 0.0))
    paths: list[tuple[int, ...]] = [(index,) for index in range(width)]
    return _Walkers(row, [row, *others], paths=paths, estimates=unknown, log_weights=even)


def _draw(walkers: Sequence[_Walkers], mean: Tensor, step: int, component: int) -> Tensor:
    """Return the noise of a step for one tensor of all candidates' states, as `walk` draws it for the nodes of a tree."""
    drawn = [
        edge_noise(each.row.seed, 0)(mean.shape[1:], 0, path, step, component)
        for each in walkers
        for path in each.paths
    ]
    return to_device(torch.stack(drawn), mean.device)


def _rows_of(state: State, places: Iterable[int]) -> State:
    chosen = list(places)
    return tuple(x[chosen] for x in state)


def _join(parts: Iterable[State]) -> State:
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))
