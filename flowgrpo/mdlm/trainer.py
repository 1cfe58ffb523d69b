"""The training loop of a masked-diffusion language model: complete prompts, score them, update the likelihoods.

The nine axes of `mdlm.methods` give the decoder, views, advantages, weights and loss; the loop never asks which method is
running. It departs from the loops of the papers' released code as follows. (Departures of a single method stand above its
row in `mdlm.methods.presets`.)

 1. A mean over completions or tokens is taken over the whole optimizer step, on all processes. The released code takes it
    over each micro-batch of a device, and then averages these means.
 2. Tokens and masks are drawn for each completion at its own address (seed of the run, iteration, group, index; for masks
    also the pass). They are the same in any batch, on any number of processes and after a resume. The released code has one
    seed for a batch. With `run.engine` only the seeds are addressed; the engine draws from them as it likes.
 3. If the decoder recorded the log-probabilities that the likelihood needs, these are the old log-probabilities. If an
    iteration has one optimizer step, no old ones are computed, because the policy is still the old one. If the views are
    the same in every pass, the log-probabilities of the old policy and of the reference are computed once for all passes.
 4. The gradient is exact for any number of views. Only the graph of one call of `train.micro_batch` evaluations is in
    memory at a time (see `mdlm.methods.backward`).
 5. Tokens that fill a completion up behind its end are not trained on, since no step of the decoder decided them. Tokens
    given as hints are not trained on either, except those that `algorithm.hints` chooses.
 6. Completions of advantage 0 stay in the update, unless `algorithm.baseline.drop_zero`.
 7. A completion has weight 0 if its reward failed or a log-probability is not finite; the others of its group are trained
    on. An optimizer step whose gradient is not finite is skipped, and counted.
 8. The rewards in the metrics are those of the policy's own completions, before hints replaced any.
 9. Held-out prompts are completed by `eval.decoder` at fixed seeds, with the average of the weights if one is kept.
    Rollouts use the trained weights themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, cast

import torch
from typing_extensions import override

from flowgrpo.data.prompts import Row
from flowgrpo.errors import InputError
from flowgrpo.mdlm.config import TextConfig
from flowgrpo.mdlm.decoding.decode import Decoder
from flowgrpo.mdlm.methods.schedules.learned_schedule import SchedulePolicy, apply_actions
from flowgrpo.mdlm.methods.schedules.schedule import LearnedSchedule
from flowgrpo.mdlm.policy import TextPolicy
from flowgrpo.mdlm.rollouts import solutions, tree_record
from flowgrpo.mdlm.rollouts.probe_calls import probe_calls
from flowgrpo.mdlm.rollouts.rollout import Batch, Rolled, rollout
from flowgrpo.mdlm.rollouts.semantic_entropy import certainty, meaning
from flowgrpo.mdlm.update import scored_tokens, update_batches, update_on
from flowgrpo.mdlm.update_batch import UpdateBatch
from flowgrpo.training.advantages.credit_units import CreditUnits
from flowgrpo.training.assembly import build_loop
from flowgrpo.training.distributed.assignment import Member, assign_minibatches
from flowgrpo.training.fitting.batch_sizes import UPDATE, ProbeCalls
from flowgrpo.training.loop import Loop
from flowgrpo.training.prompts.prompt_groups import Groups
from flowgrpo.training.reports.samples import Sample, Text
from flowgrpo.training.reports.tree_store import KeptTree
from flowgrpo.training.scoring.held_out import evaluate
from flowgrpo.training.state import RunState
from flowgrpo.training.weights.optimizer_step import UpdateStats
from flowgrpo.training.weights.trained_weights import Weights
from flowgrpo.training.wing import Compared, KeptGraphs, Minibatches, Wing
from rewards import Reward


class Engine(Protocol):
    """An engine that completes prompts in place of the policy (`run.engine`); the package flowgrpo-engine has one."""

    def roll_out(
        self, run: RunState, members: Sequence[Member], texts: Sequence[str], *, iteration: int, micro_batch: int
    ) -> Rolled:
        """Return completions of prompts with the engine's report on them; `members` are their (group, index)."""


class TextWing(Wing):
    """A masked-diffusion language model in the training loop.

    `schedule`, one of the trained modules, draws settings of the decoder (Co-GRPO); None if its settings are fixed.
    `engine` samples rollouts in place of the policy; None if the policy samples them.
    """

    def __init__(self, run: RunState, *, schedule: SchedulePolicy | None = None, engine: Engine | None = None):
        self.run, self.schedule, self.engine = run, schedule, engine
        self.policy: TextPolicy = run.policy
        self.kept_graphs = KeptGraphs()
        if self.config.algorithm.credit.name == "step_gain":
            _check_drafts(run.rewards, self.policy)
        solutions.check_lengths(self.policy, run.train_prompts, self.config.algorithm.objective.solutions)
        self.decoder, self.eval_decoder = (
            decoder.build(self.policy.length, self.policy.eos_id, place, predictor=self.policy.predictor)
            for decoder, place in (
                (self.config.algorithm.decoder, "algorithm.decoder"),
                (self.config.eval.decoder, "eval.decoder"),
            )
        )

    @property
    def config(self) -> TextConfig:
        """The configuration, with the batch sizes found so far."""
        return cast("TextConfig", self.run.config)

    @override
    def probe_calls(self) -> ProbeCalls:
        run, algorithm = self.run, self.config.algorithm
        return probe_calls(
            self.policy,
            run.weights,
            run.train_prompts,
            decoder=lambda count: self._typical(self.decoder, count),
            likelihood=algorithm.likelihood,
            drafts=algorithm.credit.name == "step_gain",
            held_out=run.held_out,
            eval_decoder=None if self.config.eval.decoder == algorithm.decoder else self._evaluated_by,
        )

    @override
    def rollout(self, iteration: int, groups: Groups) -> Batch:
        run, assignment = self.run, self.run.assignment(iteration, groups)
        leaves = self.config.algorithm.tree.leaves
        members = [(group, root * leaves + leaf) for group, root in assignment.own for leaf in range(leaves)]
        prompts = [run.train_prompts[groups.prompts[group]] for group, _ in members]
        rolled, column = None, self.config.algorithm.objective.solutions
        if column is not None:
            rolled = solutions.write_solutions(self.policy, prompts, column), None
        if self.engine is not None:
            texts, rows = [prompt.text for prompt in prompts], self.config.train.rollout_rows
            rolled = self.engine.roll_out(run, members, texts, iteration=iteration, micro_batch=rows)
        return rollout(
            self.config,
            self.policy,
            iteration=iteration,
            groups=groups,
            members=members,
            rows=[Row(p.text, index, p.columns) for p, (_, index) in zip(prompts, members, strict=True)],
            rewards=run.rewards,
            decoder=self.decoder,
            schedule=self.schedule,
            rolled=rolled,
            assignment=assignment,
            gather=run.gather_rolled,
        )

    @override
    def units(self, batch: Batch) -> CreditUnits:
        return self.config.algorithm.credit.units(batch.earned(self.run.combination))

    @override
    def group_factors(self, batch: Batch) -> torch.Tensor | None:
        """Return how sure the policy is of each group's answer; None without `train.semantic_entropy`."""
        sensitivity = self.config.train.semantic_entropy
        if sensitivity == 0:
            return None
        own = [(group, meaning(text)) for (group, _), text in zip(batch.members, batch.completions.texts, strict=True)]
        groups, meanings = zip(*self.run.collectives.gather_shards(own), strict=True)
        return certainty(groups, meanings, sensitivity=sensitivity, groups=len(batch.groups.prompts))

    @override
    def observe(self, units: CreditUnits, batch: Batch) -> dict[str, Any]:
        """Return metrics of the agreement between the engine's log-probabilities and the policy's; {} without an engine."""
        if batch.engine is None:
            return {}
        return batch.engine.line(self.run, scored_tokens(self.config, self.policy, batch))

    @override
    def minibatches(self, batch: Batch, compared: Compared) -> TextMinibatches:
        return TextMinibatches(self, batch, compared)

    @override
    def eval_samples(self) -> list[Sample]:
        run, config = self.run, self.config
        return evaluate(
            self._generate,
            run.eval_prompts,
            [*run.rewards, *run.eval_rewards],
            micro_batch=config.train.rollout_rows,
            shard=run.shard,
            gather=run.collectives.gather_shards,
            keep=config.eval.save,
        )

    def _generate(self, rows: Sequence[Row]) -> list[Text]:
        decoder = self._evaluated_by(len(rows))
        seeds = [(self.config.run.seed, "eval", row.seed) for row in rows]
        texts = [row.prompt for row in rows]
        return self.policy.as_samples(self.policy.generate(texts, decoder, seeds, self.config.train.rollout_rows))

    def _evaluated_by(self, count: int) -> Decoder:
        scheduled = self.config.eval.decoder.name == "scheduled"
        return self._typical(self.eval_decoder, count) if scheduled else self.eval_decoder

    def _typical(self, decoder: Decoder, count: int) -> Decoder:
        """Return the decoder for `count` answers; settings that a learned schedule draws take their current medians."""
        return decoder if self.schedule is None else apply_actions(decoder, self.schedule.typical(count))


class TextMinibatches(Minibatches):
    """The optimizer steps of an iteration: in each pass one for each of `train.updates` parts of the completions."""

    sized_by = UPDATE

    def __init__(self, wing: TextWing, batch: Batch, compared: Compared):
        self._wing, self._batch, self._compared = wing, batch, compared
        self._steps: list[UpdateBatch] = []

    @override
    def prepare(self) -> None:
        if self._steps:
            return
        wing, batch, compared = self._wing, self._batch, self._compared
        parts, leaves = (
            assign_minibatches(wing.config, batch.groups, batch.iteration),
            wing.config.algorithm.tree.leaves,
        )
        trained, weights = compared.trained & compared.units.values.isfinite().any(1), batch.groups.weights[batch.group]
        unit = wing.config.algorithm.credit.of_tokens(compared.units, batch.earned(wing.run.combination))
        self._steps = update_batches(
            wing.config,
            wing.policy,
            wing.run.weights,
            batch,
            advantages=compared.advantages[unit],
            weight=(weights[:, None] if unit.ndim == 2 else weights) * (compared.units.weight * trained)[unit],
            parts=torch.tensor([parts[group][index // leaves] for group, index in batch.members]),
            versions=wing.run.versions,
        )

    @override
    def __len__(self) -> int:
        return self._wing.config.train.steps

    @override
    def tree_records(self) -> list[KeptTree]:
        wing, compared = self._wing, self._compared
        return tree_record.build_kept_trees(
            wing.config,
            wing.policy,
            wing.run.combination,
            self._batch,
            units=compared.units,
            advantages=compared.advantages,
            trained=compared.trained,
            names=wing.run.reward_names,
        )

    @override
    def step(self, number: int) -> UpdateStats:
        run = self._wing.run
        run.set_learning_rate(number)
        return update_on(
            self._wing.config,
            self._wing.policy,
            self._steps[number],
            self._batch,
            weights=run.weights,
            optimizer=run.optimizer,
            scaler=run.scaler,
            schedule=self._wing.schedule,
            collectives=run.collectives,
        )


def text_loop(
    config: TextConfig,
    policy: TextPolicy,
    weights: Weights,
    *,
    schedule: SchedulePolicy | None = None,
    engine: Engine | None = None,
    **options: Any,
) -> Loop:
    """Return the training loop; `schedule` and `engine` are those of `TextWing`, `options` those of `RunState`."""
    run = RunState(config, policy, weights, parameter_groups=_parameter_groups(config, weights, schedule), **options)
    return build_loop(run, TextWing(run, schedule=schedule, engine=engine))


def _check_drafts(rewards: Sequence[Reward], policy: TextPolicy) -> None:
    """Raise InputError if the predictions of single steps cannot be made or scored, as the credit step_gain needs."""
    if policy.predictor.block_size is not None:
        raise InputError(
            "algorithm.credit: step_gain needs predictions of whole answers, no block of this model sees later ones"
        )
    for reward in rewards:
        if reward.group_wise:
            raise InputError(f"algorithm.credit: step_gain scores single predictions, {reward.name} compares a group")


def _parameter_groups(
    config: TextConfig, weights: Weights, schedule: SchedulePolicy | None
) -> list[dict[str, Any]] | None:
    """Return two parameter groups: the model's, and the schedule's with its own learning rate; None without a schedule."""
    if schedule is None:
        return None
    section, learned = config.algorithm.schedule, list(schedule.parameters())
    assert isinstance(section, LearnedSchedule), "only a learned schedule has a policy"
    others = [p for p in weights.parameters if all(p is not one for one in learned)]
    return [{"params": others}, {"params": learned, "lr": section.learning_rate}]
