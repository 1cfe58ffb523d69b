"""The loop over a masked-diffusion language model: answers are decoded and scored, and their likelihoods moved.

It asks the axes for a decoder, views, advantages, weights and a loss, and never which method that is.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from flowgrpo.data.prompts import Row
from flowgrpo.mdlm.config import TextConfig
from flowgrpo.mdlm.decoding.decode import GIVEN, Decoder, Rollout
from flowgrpo.mdlm.methods import hints as hinted
from flowgrpo.mdlm.methods.answers import Answers, in_scope
from flowgrpo.mdlm.methods.backward import Outcome, backward
from flowgrpo.mdlm.methods.estimate import estimate
from flowgrpo.mdlm.methods.objective import Objective
from flowgrpo.mdlm.methods.schedule import Actions, SchedulePolicy, acted, scheduled
from flowgrpo.mdlm.methods.views import Views
from flowgrpo.mdlm.policy import TextPolicy, Written
from flowgrpo.training.baseline import Units
from flowgrpo.training.evaluate import evaluate
from flowgrpo.training.groups import Groups
from flowgrpo.training.loop import Loop
from flowgrpo.training.optimize import Measured, moved
from flowgrpo.training.report import peak_bytes
from flowgrpo.training.samples import Sample, Text
from flowgrpo.training.scorer import Scorer, Scores
from flowgrpo.training.surrogate import bounded_exp
from flowgrpo.training.weights import Weights
from samplers.noise import Address

Tensor = torch.Tensor


@dataclass(frozen=True)
class Batch:
    """This process's answers of an iteration.

    Attributes:
        places: (B,) group of each, and its place in it.
        rows: (B,) prompts.
        written: the answers.
        scores: their rewards.
        actions: of the schedule, or None.
        unhelped: (B, R) the rewards before hints changed anything.
        hinted: how many answers were replaced by ones that were given parts of a solution.
    """

    places: list[tuple[int, int]]
    rows: list[Row]
    written: Written
    scores: Scores
    actions: Actions | None
    unhelped: Tensor
    hinted: int = 0


@dataclass(frozen=True)
class Step:
    """What one optimizer step is made of: answers, their advantages and weights (B,), their views, and (n, B, L) log p.

    `old` is of the policy that made them, None for that of the present one; `reference` is None where none is needed.
    """

    rows: Tensor
    answers: Answers
    advantage: Tensor
    weight: Tensor
    views: Views
    old: Tensor | None
    reference: Tensor | None

    def finite(self) -> Step:
        """The step without answers that have a log-probability which is not finite: 0 x NaN is NaN in every gradient."""
        known = [each.isfinite().all(2).all(0) for each in (self.old, self.reference) if each is not None]
        if not known or torch.stack(known).all():
            return self
        kept = torch.stack(known).all(0).nonzero()[:, 0]
        return Step(
            self.rows[kept.cpu()],
            self.answers.of(kept),
            self.advantage[kept],
            self.weight[kept],
            self.views.of(kept),
            None if self.old is None else self.old[:, kept],
            None if self.reference is None else self.reference[:, kept],
        )


class TextTrainer(Loop):
    """One run over a language model; arguments as of `Loop`, and

    Args:
        policy: the model with its tokenizer.
        schedule: the policy of the decoder's numbers, one of the trained modules, or None.
    """

    def __init__(
        self,
        config: TextConfig,
        policy: TextPolicy,
        weights: Weights,
        *args: Any,
        schedule: SchedulePolicy | None = None,
        **kwargs: Any,
    ):
        self.policy, self.schedule = policy, schedule
        super().__init__(config, weights, *args, **kwargs)
        self.decoder, self.eval_decoder = (
            decoder.build(policy.length, policy.eos_id, place, policy.predictor)
            for decoder, place in (
                (config.algorithm.decoder, "algorithm.decoder"),
                (config.eval.decoder, "eval.decoder"),
            )
        )

    def _parameter_groups(self) -> list[dict[str, Any]]:
        if self.schedule is None:
            return super()._parameter_groups()
        own = list(self.schedule.parameters())
        others = [p for p in self.weights.parameters if all(p is not one for one in own)]
        return [{"params": others}, {"params": own, "lr": self.config.algorithm.schedule.learning_rate}]

    @property
    def _evaluations(self) -> int:
        return self.policy.evaluations

    def _iterate(self) -> dict[str, Any]:
        started, evaluations = time.perf_counter(), self._evaluations
        groups = self._groups(self.done)
        batch = self._rollout(groups)
        rolled, rolled_out = self._evaluations - evaluations, time.perf_counter()
        group = torch.tensor([group for group, _ in batch.places])
        ones, units = torch.ones(len(group), dtype=torch.float64), torch.arange(len(group))
        advantages, trained, seen = self._compared(
            Units(batch.scores.values, group[:, None], ones, units),
            batch.unhelped,
            group.tolist(),
            batch.scores,
            groups,
        )
        kept = trained & batch.scores.values.isfinite().any(1)
        dealt = self._parts(self.done, groups)
        parts = torch.tensor([dealt[group][index] for group, index in batch.places])
        measured = self._update(batch, advantages, groups.weights[group] * kept, parts)
        updated = self._evaluations - evaluations - rolled
        hints = {"reward/hinted": int(self._sum(torch.tensor(float(batch.hinted))))}
        return {
            **seen,
            **(hints if self.config.algorithm.hints.name != "none" else {}),
            **self._policy_metrics(measured),
            **self._counts(rolled, updated, measured, len(batch.rows)),
            "time/rollout": rolled_out - started,
            "time/reward": batch.scores.seconds,
            "time/update": time.perf_counter() - rolled_out,
            "memory/peak_bytes": peak_bytes(self.accelerator.device),
        }

    # Rollout

    def _rollout(self, groups: Groups) -> Batch:
        config, rank, processes = self.config, self.accelerator.process_index, self.accelerator.num_processes
        places = [(g, i) for g in range(rank, config.train.groups, processes) for i in range(groups.roots[g])]
        prompts = [self.train_prompts[groups.prompts[group]] for group, _ in places]
        rows = [Row(prompt.text, index, prompt.columns) for prompt, (_, index) in zip(prompts, places, strict=True)]
        seeds = [self._address("answer", *place) for place in places]
        actions = None if self.schedule is None else self.schedule.draw(seeds)
        written = self._write(rows, self._decoder(actions), seeds)
        scores = self._scored(written, rows, places)
        batch = Batch(places, rows, written, scores, actions, scores.values)
        return batch if config.algorithm.hints.name == "none" else self._helped(batch)

    def _address(self, *parts: Address) -> tuple[Address, ...]:
        return (self.config.run.seed, parts[0], self.done, *parts[1:])

    def _decoder(self, actions: Actions | None) -> Decoder:
        return self.decoder if actions is None else scheduled(self.decoder, actions)

    def _write(
        self, rows: Sequence[Row], decoder: Decoder, seeds: Sequence[Address], fixed: Tensor | None = None
    ) -> Written:
        texts = [row.prompt for row in rows]
        return self.policy.write(texts, decoder, seeds, self.config.train.rollout_rows, fixed)

    def _scored(self, written: Written, rows: Sequence[Row], places: Sequence[tuple[int, int]]) -> Scores:
        """Rewards of answers, a call for each group; lost where a token's log-probability is no number."""
        texts = written.texts
        starts = [at for at, (group, _) in enumerate(places) if at == 0 or places[at - 1][0] != group]
        with Scorer(self.rewards) as scorer:
            waiting = [
                scorer.submit(texts[start:end], rows[start:end])
                for start, end in zip(starts, [*starts[1:], len(places)], strict=True)
            ]
            scored = [wait() for wait in waiting]
        broken = ~written.rollout.commit_logp.isfinite().all(1).cpu()
        values = torch.cat([s.values for s in scored]).masked_fill(broken[:, None], torch.nan)
        return Scores(values, torch.cat([s.lost for s in scored]) | broken, sum(s.seconds for s in scored))

    def _helped(self, batch: Batch) -> Batch:
        """The answers with those of failed groups replaced by ones that hints led to a success."""
        settings = self.config.algorithm.hints
        deciding = [reward.name for reward in self.rewards].index(settings.reward) if settings.reward else 0
        own = batch.scores.values[:, deciding]
        groups = set(hinted.failed(own, [group for group, _ in batch.places], settings.success))
        asked = [
            at
            for at, ((group, _), row) in enumerate(zip(batch.places, batch.rows, strict=True))
            if group in groups and row.columns.get(settings.column)
        ]
        if not asked:
            return batch
        seeds = [self._address("hinted", *batch.places[at]) for at in asked]
        policy, mask_id = self.policy, self.policy.predictor.mask_id
        solutions = [
            torch.tensor(policy.tokens(batch.rows[at].columns[settings.column]), dtype=torch.long, device=policy.device)
            for at in asked
        ]
        fixed = hinted.revealed(settings, solutions, policy.length, mask_id, seeds)
        given = (fixed != mask_id).any(1)
        if not given.any():  # the solutions are too short for hints
            return batch
        fixed = fixed[given]
        asked, seeds = ([x for x, one in zip(row, given.tolist(), strict=True) if one] for row in (asked, seeds))
        rows, places = [batch.rows[at] for at in asked], [batch.places[at] for at in asked]
        written = self._write(rows, self.decoder, seeds, fixed)
        scores = self._scored(written, rows, places)
        found = scores.values[:, deciding]
        sizes = Counter(group for group, _ in batch.places)
        pairs = []
        for group in dict.fromkeys(group for group, _ in places):
            own = [i for i, place in enumerate(places) if place[0] == group]
            pairs += [(asked[own[a]], own[b]) for a, b in hinted.exchanged(found[own], settings, sizes[group])]
        return _replaced(batch, written, scores, pairs)

    # Update

    def _update(self, batch: Batch, advantages: Tensor, weight: Tensor, parts: Tensor) -> list[Measured]:
        """An optimizer step for each part of each pass; what fixed views need is computed once for all passes.

        Args:
            parts: (B,) which part an answer belongs to.
        """
        train, rollout, likelihood = self.config.train, batch.written.rollout, self.config.algorithm.likelihood
        scope = in_scope(rollout.completion, self.policy.eos_id, likelihood.scope)
        # Neither what was given nor what fills a row up behind its end was decided.
        scored = scope & (rollout.step_map != GIVEN) & (rollout.step_map < rollout.steps[:, None])
        if batch.hinted:
            scored |= hinted.uncertain(
                self.policy.predictor, rollout, scope, self.config.algorithm.hints.entropy, train.rollout_rows
            )
        drawn = 1 if likelihood.fixed else train.passes
        steps = [
            self._step(batch, scored, advantages, weight, number, (parts == part).nonzero()[:, 0])
            for number in range(drawn)
            for part in range(train.updates)
        ]
        if likelihood.recorded(self._decoder(batch.actions)):
            steps = [replace(step, old=_committed(step, rollout)) for step in steps]
        elif train.passes * train.updates > 1:  # a single step starts from the policy that made the answers
            steps = [replace(step, old=self._log_probs(step)) for step in steps]
        return [self._stepped(number, step, batch) for number, step in enumerate(steps * (train.passes // drawn))]

    def _step(
        self, batch: Batch, scored: Tensor, advantages: Tensor, weight: Tensor, number: int, rows: Tensor
    ) -> Step:
        """The answers of some rows in a pass, without those that weigh nothing."""
        rows = rows[weight[rows] > 0]
        rollout, device = batch.written.rollout, scored.device
        answers = Answers(
            rollout.ids,
            rollout.attention_mask,
            scored,
            [self._address("views", *place, number) for place in batch.places],
            rollout.step_map,
            self.policy.predictor.block_size,
        ).of(rows.to(device))
        views = self.config.algorithm.likelihood.views(answers)
        step = Step(rows, answers, advantages[rows].to(device), weight[rows].to(device), views, None, None)
        kl = self.config.algorithm.objective.kl
        if kl.beta == 0 or kl.target != "reference":
            return step
        with self.weights.reference():
            return replace(step, reference=self._log_probs(step))

    def _log_probs(self, step: Step) -> Tensor:
        return estimate(self.policy.predictor, step.answers, step.views, self.config.train.micro_batch).each

    def _stepped(self, number: int, step: Step, batch: Batch) -> Measured:
        """Take an optimizer step, the iteration's `number`th."""
        self._set_learning_rate(number)
        step = step.finite()
        algorithm, train = self.config.algorithm, self.config.train
        answers, advantage, views = step.answers, step.advantage.float(), step.views
        # Not of what the views happen to score: a weight must not depend on the masks.
        token_weight = algorithm.aggregation.weights(answers.scored, advantage, views.first, self._sum)
        token_weight = token_weight * step.weight.float()[:, None]  # not divided out again
        scored = views.scored.any(0)
        total, tokens = self._sum(torch.tensor([float(len(step.rows)), float(scored.sum())])).tolist()
        measured, objective = Measured(drift=None), algorithm.objective
        self.optimizer.zero_grad(set_to_none=True)
        if scored.any():
            outcome = backward(
                self.policy.predictor,
                answers,
                views,
                objective,
                advantage,
                token_weight,
                step.old,
                step.reference,
                train.micro_batch,
                self.scaler.scale,
            )
            _measure(measured, outcome, objective, scored, step.old is not None)
            if batch.actions is not None:
                self.scaler.scale(self._schedule_loss(step, batch) / total).backward()
        if tokens > 0:
            moved(self.weights, self.optimizer, self.scaler, train.max_grad_norm, self._sum, measured)
        return measured

    def _schedule_loss(self, step: Step, batch: Batch) -> Tensor:
        """Loss of the schedule's actions, the weighted sum over answers of the mean over the steps they took."""
        actions, rows = batch.actions, step.rows
        took = acted(batch.written.rollout, actions)[rows]
        gap = self.schedule.log_prob(actions.raw[rows]) - actions.log_prob[rows]
        loss = self.config.algorithm.objective.ratio_loss(bounded_exp(gap), step.advantage.float()[:, None])
        each = (loss * took).sum(1) / took.sum(1).clamp(min=1)
        return (each * step.weight.float()).sum()

    # Evaluation

    def _sampled(self) -> list[Sample]:
        config = self.config
        return evaluate(
            self._generate,
            self.eval_prompts,
            [*self.rewards, *self.eval_rewards],
            config.train.rollout_rows,
            self.accelerator,
            keep=config.eval.save,
        )

    def _generate(self, rows: Sequence[Row]) -> list[Text]:
        decoder = self.eval_decoder
        if self.schedule is not None and self.config.eval.decoder.name == "scheduled":
            decoder = scheduled(decoder, self.schedule.typical(len(rows)))
        seeds = [(self.config.run.seed, "eval", row.seed) for row in rows]
        return self.policy.shown(self._write(rows, decoder, seeds))


def _replaced(batch: Batch, written: Written, scores: Scores, pairs: Sequence[tuple[int, int]]) -> Batch:
    """A batch with some answers (first of a pair) replaced by others (second)."""
    if not pairs:
        return batch
    into, of = (torch.tensor(places) for places in zip(*pairs, strict=True))
    rollout = batch.written.rollout
    wider = rollout.prompt - written.rollout.prompt  # the prompts of all answers may be padded to more
    tensors = {}
    for field in fields(Rollout):
        own, new = getattr(rollout, field.name).clone(), getattr(written.rollout, field.name)[of]
        own[into] = torch.nn.functional.pad(new, (wider, 0)) if field.name in ("ids", "attention_mask") else new
        tensors[field.name] = own
    texts, values, lost = list(batch.written.texts), batch.scores.values.clone(), batch.scores.lost.clone()
    for place, new in pairs:
        texts[place] = written.texts[new]
    values[into], lost[into] = scores.values[of], scores.lost[of]
    both = Scores(values, lost, batch.scores.seconds + scores.seconds)
    return replace(batch, written=Written(Rollout(**tensors), texts), scores=both, hinted=len(pairs))


def _committed(step: Step, rollout: Rollout) -> Tensor:
    """Log p (n, B, L) of the tokens that each view scores, as the decoder recorded them."""
    logp = rollout.commit_logp[step.rows.to(rollout.commit_logp.device)]
    return logp.to(step.views.weight).where(step.views.scored, 0.0)


def _measure(measured: Measured, outcome: Outcome, objective: Objective, scored: Tensor, moved: bool) -> None:
    """Put what an update did into its sums, which are per token: what is of a whole answer counts for each of its tokens.

    Args:
        scored: (B, L) bool.
        moved: whether the policy may have moved, so that the ratio is measured and not 1 by definition.
    """
    log_ratio, stopped = objective.log_ratio(outcome.inputs).abs(), objective.stopped(outcome.inputs)
    if log_ratio.ndim == 1:
        log_ratio, stopped = (x[:, None].expand(scored.shape) for x in (log_ratio, stopped))
    measured.edges = int(scored.sum())
    measured.drift = float(log_ratio[scored].max()) if moved else None
    measured.ratio = float(log_ratio[scored].sum())
    measured.clipped = int(stopped[scored].sum())
    if objective.kl.beta > 0:
        measured.kl = float(objective.kl.mean(replace(outcome.inputs, token_weight=scored.float())))
