"""The loop over a masked-diffusion language model: prompts are completed and scored, and likelihoods moved.

The seven axes give the decoder, the views, advantages, weights and the loss; nothing here asks which method is running. How
the loop departs from those of the papers' released code (how a method departs from its source stands above its row in
`mdlm.methods.presets`):

 1. A mean over completions or tokens is taken over the whole optimizer step, on all processes; there it is taken over a
    device's micro-batch, and then over those means.
 2. Tokens and masks are drawn for each completion at an address of its own (seed of the run, iteration, group, index; masks
    also by the pass), so that they are the same in any batch, on any number of processes and after a resume; there one seed
    serves a batch. With `run.engine` only the seeds are addressed, and what is drawn from them is the engine's.
 3. The old log-probabilities are the decoder's own numbers where the likelihood has them, and are not computed where an
    iteration has one optimizer step, for the policy is then still the old one. Where the views are the same in every pass,
    the log-probabilities of the old policy and of the reference are computed once for all passes.
 4. The gradient is exact for any number of views, with the graph of one call of `train.micro_batch` evaluations in memory at
    a time (see `mdlm.methods.backward`).
 5. Tokens that fill a completion up behind its end, which no step of the decoder decided, are not trained on; of the tokens
    that were given, only those that `algorithm.hints` chooses are.
 6. Completions of advantage 0 stay in the update, unless `algorithm.baseline.drop_zero`.
 7. A completion whose reward failed, or with a log-probability that is not finite, has weight 0, and the rest of its group
    is trained on. An optimizer step whose gradient is not finite is skipped, and counted.
 8. The rewards in the metrics are those of the policy's own completions, before hints replaced any.
 9. Held-out prompts are completed by `eval.decoder`, at fixed seeds, with the average of the weights where one is kept;
    rollouts are the live weights' own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from typing_extensions import override

from flowgrpo.data.prompts import Row
from flowgrpo.mdlm.config import TextConfig
from flowgrpo.mdlm.decoding.decode import Decoder
from flowgrpo.mdlm.engine import request
from flowgrpo.mdlm.engine.correction import mismatch
from flowgrpo.mdlm.engine.rollout import EngineRollout, Rolled
from flowgrpo.mdlm.methods.schedules.learned_schedule import SchedulePolicy, scheduled
from flowgrpo.mdlm.methods.schedules.schedule import LearnedSchedule
from flowgrpo.mdlm.policy import TextPolicy
from flowgrpo.mdlm.rollouts import tree_record
from flowgrpo.mdlm.rollouts.probe_calls import probe_calls
from flowgrpo.mdlm.rollouts.rollout import Batch, rollout
from flowgrpo.mdlm.update import UpdateBatch, scored_tokens, update_batches, update_on
from flowgrpo.training.advantages.credit_units import CreditUnits
from flowgrpo.training.advantages.prompt_groups import Groups
from flowgrpo.training.distributed.assignment import parts_of
from flowgrpo.training.distributed.minibatches import Member
from flowgrpo.training.engine.asking import rolled_out, told
from flowgrpo.training.fitting.batch_sizes import UPDATE, ProbeCalls
from flowgrpo.training.loop import Loop
from flowgrpo.training.reports.samples import Sample, Text
from flowgrpo.training.scoring import rollout_batch
from flowgrpo.training.scoring.held_out import evaluate
from flowgrpo.training.weights.optimizer_step import UpdateStats
from flowgrpo.training.weights.trained_weights import Weights


class TextTrainer(Loop):
    """One run over a language model; arguments as of `Loop`, and

    Args:
        policy: the model with its tokenizer.
        schedule: the policy of the decoder's numbers, one of the trained modules, or None.
        engine: that rolls out; None where the policy does.
    """

    config: TextConfig

    def __init__(
        self,
        config: TextConfig,
        policy: TextPolicy,
        weights: Weights,
        *,
        schedule: SchedulePolicy | None = None,
        engine: EngineRollout | None = None,
        **options: Any,
    ):
        self.policy, self.schedule, self.engine = policy, schedule, engine
        super().__init__(config, weights, **options)
        self.decoder, self.eval_decoder = (
            decoder.build(policy.length, policy.eos_id, place, predictor=policy.predictor)
            for decoder, place in (
                (config.algorithm.decoder, "algorithm.decoder"),
                (config.eval.decoder, "eval.decoder"),
            )
        )

    @override
    def probe_calls(self) -> ProbeCalls:
        algorithm, same = self.config.algorithm, self.config.eval.decoder == self.config.algorithm.decoder
        return probe_calls(
            self.policy,
            self.weights,
            self.train_prompts,
            decoder=lambda count: self._typical(self.decoder, count),
            likelihood=algorithm.likelihood,
            held_out=self.eval_prompts if self.roles.samples_held_out(self.accelerator.process_index) else (),
            eval_decoder=None if same else self._evaluated_by,
        )

    @override
    def parameter_groups(self) -> list[dict[str, Any]]:
        """The model's parameters and, with a learning rate of their own, the schedule's."""
        if self.schedule is None:
            return super().parameter_groups()
        section, own = self.config.algorithm.schedule, list(self.schedule.parameters())
        assert isinstance(section, LearnedSchedule), "it has made the policy"
        others = [p for p in self.weights.parameters if all(p is not one for one in own)]
        return [{"params": others}, {"params": own, "lr": section.learning_rate}]

    @override
    def rollout(self, iteration: int, groups: Groups) -> Batch:
        """Complete this process's share of the prompts; the completions are the samples."""
        assignment = self.assignment(iteration, groups)
        members = list(assignment.own)
        prompts = [self.train_prompts[groups.prompts[group]] for group, _ in members]
        texts = [prompt.text for prompt in prompts]
        return rollout(
            self.config,
            self.policy,
            iteration=iteration,
            groups=groups,
            members=members,
            rows=[Row(p.text, index, p.columns) for p, (_, index) in zip(prompts, members, strict=True)],
            rewards=self.rewards,
            decoder=self.decoder,
            schedule=self.schedule,
            rolled=None if self.engine is None else self._by_engine(self.engine, iteration, members, texts),
            assignment=assignment,
            gather=self.gather_rolled,
        )

    def _by_engine(
        self, engine: EngineRollout, iteration: int, members: Sequence[Member], texts: Sequence[str]
    ) -> Rolled:
        """Let the engine complete this process's prompts, scored here where somebody asks; errors as of `rolled_out`."""
        config = self.config

        def roll() -> Rolled:
            adapter, *_ = self.collectives.gather([engine.adapters.pushed])  # which the main process knows
            return engine.roll_out(
                self.policy.prompts(texts),
                members,
                seed=config.run.seed,
                iteration=iteration,
                adapter=adapter,
                scored=request.scored(config, self.decoder),
                micro_batch=config.train.rollout_rows,
            )

        return rolled_out(self, roll)

    @override
    def units(self, batch: Batch) -> CreditUnits:
        """The completions, each compared with the others of its group."""
        count = len(batch.members)
        ones, units = torch.ones(count, dtype=torch.float64), torch.arange(count)
        root = torch.tensor([index for _, index in batch.members])
        values = self.combination.columns(batch.scores.values)
        return CreditUnits(values, batch.group[:, None], ones, units, root=root)

    @override
    def advantages(
        self, units: CreditUnits, batch: rollout_batch.Batch
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        advantages, trained, seen = super().advantages(units, batch)
        assert isinstance(batch, Batch)
        if batch.engine is None:
            return advantages, trained, seen
        section = self.config.run.engine
        assert section is not None
        logp, scored = batch.completions.rollout.commit_logp, scored_tokens(self.config, self.policy, batch)
        own = mismatch(logp, batch.engine, scored, section.truncate)
        return advantages, trained, seen | told(self, own, unit="token", same="model, precision and blocks")

    @override
    def update(
        self, batch: Batch, units: CreditUnits, advantages: torch.Tensor, trained: torch.Tensor
    ) -> list[UpdateStats]:
        """Take an optimizer step on each part of the completions in each pass."""
        self.record_trees(
            tree_record.parts(
                self.config,
                self.policy,
                self.combination,
                batch,
                units=units,
                advantages=advantages,
                trained=trained,
                names=self.reward_names,
            )
        )
        parts = parts_of(self.config, batch.groups, batch.iteration)
        steps = self.retrying.attempt(
            UPDATE,
            lambda: update_batches(
                self.config,
                self.policy,
                self.weights,
                batch,
                advantages=advantages,
                weight=batch.groups.weights[batch.group] * (trained & units.values.isfinite().any(1)),
                parts=torch.tensor([parts[group][index] for group, index in batch.members]),
                versions=self.versions,
            ),
        )
        return [
            self.retrying.attempt(UPDATE, partial(self._update_on, number, each, batch))
            for number, each in enumerate(steps)
        ]

    @override
    def eval_samples(self) -> list[Sample]:
        """Complete each prompt by `eval.decoder`."""
        config = self.config
        return evaluate(
            self._generate,
            self.eval_prompts,
            [*self.rewards, *self.eval_rewards],
            micro_batch=config.train.rollout_rows,
            share=self.share,
            gather=self.collectives.gather_shares,
            keep=config.eval.save,
        )

    def _update_on(self, number: int, update_batch: UpdateBatch, batch: Batch) -> UpdateStats:
        self._set_learning_rate(number)
        return update_on(
            self.config,
            self.policy,
            update_batch,
            batch,
            weights=self.weights,
            optimizer=self.optimizer,
            scaler=self.scaler,
            schedule=self.schedule,
            collectives=self.collectives,
        )

    def _generate(self, rows: Sequence[Row]) -> list[Text]:
        decoder = self._evaluated_by(len(rows))
        seeds = [(self.config.run.seed, "eval", row.seed) for row in rows]
        texts = [row.prompt for row in rows]
        return self.policy.as_samples(self.policy.generate(texts, decoder, seeds, self.config.train.rollout_rows))

    def _evaluated_by(self, count: int) -> Decoder:
        """The decoder of so many answers of an evaluation."""
        scheduled = self.config.eval.decoder.name == "scheduled"
        return self._typical(self.eval_decoder, count) if scheduled else self.eval_decoder

    def _typical(self, decoder: Decoder, count: int) -> Decoder:
        """A decoder of so many answers, with the middle of a learned schedule for its numbers where there is one."""
        return decoder if self.schedule is None else scheduled(decoder, self.schedule.typical(count))
