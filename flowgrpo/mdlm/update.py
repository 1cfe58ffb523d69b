"""The update of a text model: likelihood estimates, and in each pass an optimizer step for each part of the completions."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import torch

from flowgrpo.mdlm.config import TextConfig
from flowgrpo.mdlm.decoding.decode import GIVEN, Rollout
from flowgrpo.mdlm.methods.backward import Outcome, backward
from flowgrpo.mdlm.methods.hints import Inpainting, highest_entropy
from flowgrpo.mdlm.methods.likelihoods.answers import Answers, in_scope
from flowgrpo.mdlm.methods.likelihoods.estimate import estimate
from flowgrpo.mdlm.methods.likelihoods.masked_views import Views
from flowgrpo.mdlm.methods.objectives.objective import Objective, Ratio
from flowgrpo.mdlm.methods.schedules.learned_schedule import SchedulePolicy, actions_taken
from flowgrpo.mdlm.policy import TextPolicy
from flowgrpo.mdlm.rollouts.rollout import BROKEN, Batch
from flowgrpo.training.distributed.collectives import Collectives
from flowgrpo.training.weights.optimizer_step import UpdateStats, optimizer_step
from flowgrpo.training.weights.policy_versions import Versions
from flowgrpo.training.weights.trained_weights import Weights

Tensor = torch.Tensor
LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class UpdateBatch:
    """The completions of one optimizer step, and all that their loss needs.

    Attributes:
        rows: (B,) int64 indices of the completions in the iteration's batch.
        group: (B,) int64 group of each completion.
        rank: (B,) reward of each by which the objective ranks good completions; 0 without one.
        advantage, weight: (B,) advantage and loss weight of each completion, or (B, L) of its tokens.
        step: (B, L) int64 step of each token, for the aggregation.
        branch: (B, L) int64 branch of each token if tokens of a branch are trained on once, in its first completion; else
            None.
        views: masked copies from which the likelihoods are estimated.
        old: (n, B, L) log p under the policy that sampled the completions; None if that is still the trained policy.
        reference: (n, B, L) log p under the reference; None without a KL term.
        correction: (B, L) importance weight of each token that an engine drew; None if no engine sent log-probabilities.
    """

    rows: Tensor
    group: Tensor
    rank: Tensor
    answers: Answers
    advantage: Tensor
    weight: Tensor
    step: Tensor
    branch: Tensor | None
    views: Views
    old: Tensor | None
    reference: Tensor | None
    correction: Tensor | None = None

    def finite(self) -> UpdateBatch:
        """Drop completions with a log-probability that is not finite: a weight of 0 would still give a NaN gradient."""
        known = [each.isfinite().all(2).all(0) for each in (self.old, self.reference) if each is not None]
        if not known or torch.stack(known).all():
            return self
        index = torch.stack(known).all(0).nonzero()[:, 0]
        LOGGER.warning(BROKEN, len(self.rows) - len(index), len(self.rows), "not trained on")
        return UpdateBatch(
            rows=self.rows[index.cpu()],
            group=self.group[index],
            rank=self.rank[index],
            answers=self.answers.of(index),
            advantage=self.advantage[index],
            weight=self.weight[index],
            step=self.step[index],
            branch=None if self.branch is None else self.branch[index],
            views=self.views.of(index),
            old=None if self.old is None else self.old[:, index],
            reference=None if self.reference is None else self.reference[:, index],
            correction=None if self.correction is None else self.correction[index],
        )


def update_batches(
    config: TextConfig,
    policy: TextPolicy,
    weights: Weights,
    batch: Batch,
    *,
    advantages: Tensor,
    weight: Tensor,
    parts: Tensor,
    versions: Versions,
) -> list[UpdateBatch]:
    """Build the batches of an iteration's optimizer steps, in order: in each pass one for each part of the completions.

    Args:
        advantages, weight: (B,) of the completions, or (B, L) of their tokens; those of weight 0 are left out.
        parts: (B,) number, from 0 to `train.updates` - 1, of the part that each completion belongs to.
        versions: earlier versions of the policy; one of them may have sampled the completions.
    """
    train, likelihood, rollout = config.train, config.algorithm.likelihood, batch.completions.rollout
    scored = scored_tokens(config, policy, batch)
    scored &= (weight if weight.ndim == 2 else weight[:, None]).to(scored.device) > 0
    branch = _branches(config, batch)
    level = batch.branches.level(rollout).to(rollout.step_map)
    steps = level.where(rollout.step_map != GIVEN, GIVEN) if likelihood.by_branch else rollout.step_map
    mask_draws = 1 if likelihood.fixed else train.passes
    kl = config.algorithm.objective.kl
    correction = None if batch.engine is None else batch.engine.correction
    rank = torch.zeros(len(batch.members)) if config.ranking is None else batch.scores.values[:, config.ranking].float()
    batches = []
    for number in range(mask_draws):
        for part in range(train.updates):
            rows = (parts == part).nonzero()[:, 0]
            rows = rows[scored.any(1).cpu()[rows]]
            answers = Answers(
                ids=rollout.ids,
                attention_mask=rollout.attention_mask,
                scored=scored,
                addresses=[(config.run.seed, "views", batch.iteration, *member, number) for member in batch.members],
                steps=steps,
                block_size=policy.predictor.block_size,
            ).of(rows.to(scored.device))
            views = likelihood.views(answers)
            of_rows = None if branch is None else branch[rows].to(scored.device)
            batches.append(
                UpdateBatch(
                    rows=rows,
                    group=batch.group[rows].to(scored.device),
                    rank=rank[rows].to(scored.device),
                    answers=answers,
                    advantage=advantages[rows].to(scored.device),
                    weight=weight[rows].to(scored.device),
                    step=views.first,
                    branch=of_rows,
                    views=views if of_rows is None or not len(rows) else views.once(of_rows),
                    old=None,
                    reference=None,
                    correction=None if correction is None else correction[rows.to(scored.device)],
                )
            )
            if kl.reference is not None:
                with weights.reference():
                    reference = log_probs(policy, batches[-1], config)
                batches[-1] = replace(batches[-1], reference=reference)
    if likelihood.recorded(batch.decoder):
        batches = [replace(each, old=_committed(each, rollout)) for each in batches]
    elif config.algorithm.objective.solutions is None and (
        train.passes * train.updates > 1 or versions.of(batch.iteration) is not None
    ):
        # A single step from the policy that sampled the completions needs no old log-probabilities: its ratios are 1.
        with versions.rolling_out(batch.iteration):
            batches = [replace(each, old=log_probs(policy, each, config)) for each in batches]
    return batches * (train.passes // mask_draws)


def log_probs(policy: TextPolicy, update_batch: UpdateBatch, config: TextConfig) -> Tensor:
    """Return log p (n, B, L) of the tokens that each view scores, under the current weights; 0 elsewhere.

    Evaluations are grouped into the same calls as in the update, so that both have the same rounding.
    """
    views, separable = update_batch.views, config.algorithm.objective.separable(update_batch.views)
    rows = config.train.update_rows
    return estimate(policy.predictor, update_batch.answers, views, rows, separable=separable).each


def update_on(
    config: TextConfig,
    policy: TextPolicy,
    update_batch: UpdateBatch,
    batch: Batch,
    *,
    weights: Weights,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    schedule: SchedulePolicy | None,
    collectives: Collectives,
) -> UpdateStats:
    """Take one optimizer step on some completions of a batch, and return its statistics on this process.

    No step is taken if no process has a scored token, or if a gradient is not finite. `schedule` is the policy that drew
    settings of the decoder (Co-GRPO); None if its settings are fixed.
    """
    update_batch = update_batch.finite()
    algorithm, train = config.algorithm, config.train
    answers, advantage, views = update_batch.answers, update_batch.advantage.float(), update_batch.views
    # Computed from `answers.scored`, not from the views: a weight must not depend on the masks.
    token_weight = algorithm.aggregation.weights(answers.scored, advantage, update_batch.step, collectives.sum)
    # The weights are not normalised again after the next two factors.
    weight = update_batch.weight.float()
    token_weight = token_weight * (weight if weight.ndim == 2 else weight[:, None])
    if update_batch.correction is not None:
        token_weight = token_weight * update_batch.correction.to(token_weight)
    if update_batch.branch is not None:
        token_weight = views.carried(token_weight, update_batch.branch)
    scored = views.scored.any(0)
    total, tokens = collectives.sum(torch.tensor([float(len(update_batch.rows)), float(scored.sum())])).tolist()
    stats, objective = UpdateStats(max_abs_log_ratio=None), algorithm.objective
    optimizer.zero_grad(set_to_none=True)
    if scored.any():
        outcome = backward(
            policy.predictor,
            answers,
            views,
            objective=objective,
            advantage=advantage,
            group=update_batch.group,
            rank=update_batch.rank,
            token_weight=token_weight,
            old=update_batch.old,
            reference=update_batch.reference,
            micro_batch=train.update_rows,
            send=lambda loss: weights.lockstep.backward(scaler.scale(loss)),
        )
        _measure(stats, outcome, objective, scored=scored, moved=update_batch.old is not None)
        if batch.actions is not None:
            assert schedule is not None, "it drew the actions"
            loss = _schedule_loss(config, schedule, update_batch, batch)
            scaler.scale(loss / total).backward()
    if tokens > 0:
        optimizer_step(
            weights,
            stats,
            optimizer=optimizer,
            scaler=scaler,
            max_grad_norm=train.max_grad_norm,
            reduce=collectives.sum_gradients,
        )
    return stats


def scored_tokens(config: TextConfig, policy: TextPolicy, batch: Batch) -> Tensor:
    """Return which tokens (B, L) bool of the completions are trained on."""
    rollout, algorithm = batch.completions.rollout, config.algorithm
    scope = in_scope(rollout.completion, policy.eos_id, algorithm.likelihood.scope)
    # The decoder decided neither given tokens nor the filling behind a row's end.
    scored = scope & (rollout.step_map != GIVEN) & (rollout.step_map < rollout.steps[:, None])
    hints = algorithm.hints
    if isinstance(hints, Inpainting) and batch.hinted:
        scored |= highest_entropy(
            policy.predictor, rollout, scope, share=hints.entropy, micro_batch=config.train.update_rows
        )
    return scored


def _branches(config: TextConfig, batch: Batch) -> Tensor | None:
    """Return the branch (B, L) of each token; None if branches are not trained on once."""
    branches = batch.branches
    if not config.algorithm.trains_branches_once:
        return None
    return branches.edge.gather(1, branches.level(batch.completions.rollout))


def _committed(update_batch: UpdateBatch, rollout: Rollout) -> Tensor:
    """Return log p (n, B, L) of the tokens that each view scores, as the decoder recorded it."""
    logp = rollout.commit_logp[update_batch.rows.to(rollout.commit_logp.device)]
    return logp.to(update_batch.views.weight).where(update_batch.views.scored, 0.0)


def _schedule_loss(config: TextConfig, schedule: SchedulePolicy, update_batch: UpdateBatch, batch: Batch) -> Tensor:
    """Return the loss of the schedule's actions: a mean over a completion's steps, then a weighted sum over completions."""
    objective, actions, rows = config.algorithm.objective, batch.actions, update_batch.rows
    assert isinstance(objective, Ratio), "the config refuses others"
    assert actions is not None
    took = actions_taken(batch.completions.rollout, actions)[rows]
    gap = schedule.log_prob(actions.raw[rows]) - actions.log_prob[rows]
    loss = objective.ratio_loss(gap, update_batch.advantage.float()[:, None])
    each = (loss * took).sum(1) / took.sum(1).clamp(min=1)
    return (each * update_batch.weight.float()).sum()


def _measure(stats: UpdateStats, outcome: Outcome, objective: Objective, *, scored: Tensor, moved: bool) -> None:
    """Add an update's outcome to the statistics, which are sums over tokens.

    A value of a whole completion counts once for each of its tokens in `scored` (B, L). `moved` is whether the policy may
    have changed since it sampled; if not, every ratio is 1 and `max_abs_log_ratio` is None.
    """
    found = (
        objective.log_ratio(outcome.inputs).abs(),
        objective.stopped(outcome.inputs),
        objective.above(outcome.inputs),
    )
    log_ratio, stopped, above = (x[:, None].expand(scored.shape) if x.ndim == 1 else x for x in found)
    stats.edges = stats.ratios = int(scored.sum())
    stats.max_abs_log_ratio = float(log_ratio[scored].max()) if moved else None
    stats.sum_abs_log_ratio = float(log_ratio[scored].sum())
    stats.clipped = int(stopped[scored].sum())
    stats.clipped_high = int((stopped & above)[scored].sum())
    if objective.kl.beta > 0:
        stats.kl = float(objective.kl.mean(replace(outcome.inputs, token_weight=scored.float())))
