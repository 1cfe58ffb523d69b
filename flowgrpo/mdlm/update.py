"""The update of a text model: likelihood estimates, and in each pass an optimizer step for each part of the completions."""

from __future__ import annotations

from dataclasses import replace

import torch

from flowgrpo.mdlm.config import TextConfig
from flowgrpo.mdlm.decoding.decode import GIVEN, Rollout
from flowgrpo.mdlm.methods.backward import Outcome, backward
from flowgrpo.mdlm.methods.hints import Inpainting, highest_entropy
from flowgrpo.mdlm.methods.likelihoods.answers import Answers, in_scope
from flowgrpo.mdlm.methods.likelihoods.distributions import entropies, gated_distances, group_spread
from flowgrpo.mdlm.methods.likelihoods.estimate import LogProb, Measure, estimate
from flowgrpo.mdlm.methods.likelihoods.masked_views import token_draws
from flowgrpo.mdlm.methods.objectives.covariance import ScoredTokens, choose_tokens
from flowgrpo.mdlm.methods.objectives.objective import Objective, Ratio, TokenRatio
from flowgrpo.mdlm.methods.objectives.self_distillation import BranchTokens, pull_tokens
from flowgrpo.mdlm.methods.objectives.token_shapes import Tokens, shape_tokens
from flowgrpo.mdlm.methods.schedules.learned_schedule import SchedulePolicy, actions_taken
from flowgrpo.mdlm.policy import TextPolicy
from flowgrpo.mdlm.rollouts.rollout import Batch
from flowgrpo.mdlm.update_batch import UpdateBatch
from flowgrpo.training.distributed.collectives import Collectives
from flowgrpo.training.weights.optimizer_step import UpdateStats, optimizer_step
from flowgrpo.training.weights.policy_versions import Versions
from flowgrpo.training.weights.trained_weights import Weights

Tensor = torch.Tensor


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
                    views=views if of_rows is None else views.once(of_rows),
                    old=None,
                    reference=None,
                    correction=None if correction is None else correction[rows.to(scored.device)],
                )
            )
            if kl.reference is not None:
                with weights.reference():
                    reference = log_probs(policy, batches[-1], config)
                batches[-1] = replace(batches[-1], reference=reference)
    recorded = likelihood.recorded(batch.decoder)
    # A single step from the policy that sampled the completions needs no old log-probabilities: its ratios are 1.
    moves = train.passes * train.updates > 1 or versions.of(batch.iteration) is not None
    needs_old = moves or config.algorithm.needs_old
    own = config.algorithm.objective.solutions is None
    if own and ((needs_old and not recorded) or config.algorithm.measure is not None):
        with versions.rolling_out(batch.iteration):
            ended = ~in_scope(rollout.completion, policy.eos_id, "eos")
            needs = needs_old and not recorded
            batches = [_before(policy, weights, each, config, ended=ended, needs_old=needs) for each in batches]
    if recorded:
        batches = [replace(each, old=_committed(each, rollout)) for each in batches]
    return batches * (train.passes // mask_draws)


def log_probs(policy: TextPolicy, update_batch: UpdateBatch, config: TextConfig) -> Tensor:
    """Return log p (n, B, L) of the tokens that each view scores, under the current weights; 0 elsewhere."""
    return _estimate(policy, update_batch, config).each


def _before(
    policy: TextPolicy,
    weights: Weights,
    update_batch: UpdateBatch,
    config: TextConfig,
    *,
    ended: Tensor,
    needs_old: bool,
) -> UpdateBatch:
    """Add what the update needs of the policy that sampled: its log-probabilities, numbers of its predictions."""
    given, name = (policy.predictor, update_batch.answers, update_batch.views), config.algorithm.measure
    if name == "group_spread":
        behind = ended[update_batch.rows.to(ended.device)]
        rows = config.train.update_rows
        spread = group_spread(*given, group=update_batch.group, ended=behind, micro_batch=rows)
        return replace(update_batch, old=log_probs(policy, update_batch, config) if needs_old else None, measure=spread)
    measure = {"entropy": entropies, "gated_distances": gated_distances(*given, weights.reference)}.get(name or "")
    found = _estimate(policy, update_batch, config, measure)
    return replace(
        update_batch,
        old=found.each if needs_old else None,
        measure=None if measure is None else found.token_measure,
    )


def _estimate(
    policy: TextPolicy, update_batch: UpdateBatch, config: TextConfig, measure: Measure | None = None
) -> LogProb:
    """Return the estimate under the current weights, from the calls of the update, so that both have the same rounding."""
    views, separable = update_batch.views, config.algorithm.objective.separable(update_batch.views)
    rows = config.train.update_rows
    return estimate(policy.predictor, update_batch.answers, views, rows, separable=separable, measure=measure)


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
    # The weights are not normalised again after the next factors.
    weight = update_batch.weight.float()
    token_weight = token_weight * (weight if weight.ndim == 2 else weight[:, None])
    if update_batch.correction is not None:
        token_weight = token_weight * update_batch.correction.to(token_weight)
    if update_batch.branch is not None:
        token_weight = views.carried(token_weight, update_batch.branch)
    token_weight = token_weight * _shape(config, update_batch, batch, collectives)
    chosen, pull = _choose(config, update_batch, collectives), _pull(config, update_batch, batch, collectives)
    scored = views.scored.any(0)
    total, tokens = collectives.sum(torch.tensor([float(len(update_batch.rows)), float(scored.sum())])).tolist()
    stats, objective = UpdateStats(max_abs_log_ratio=None), _balance(config, policy, update_batch, collectives)
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
            chosen=chosen,
            pull=pull,
            send=lambda loss: weights.lockstep.backward(scaler.scale(loss)),
        )
        _measure(stats, outcome, objective, scored=scored, moved=update_batch.old is not None)
        if batch.actions is not None:
            assert schedule is not None, "it drew the actions"
            loss = _schedule_loss(objective, schedule, update_batch, batch)
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


def _shape(config: TextConfig, update_batch: UpdateBatch, batch: Batch, collectives: Collectives) -> Tensor:
    """Return the weights (B, L) of `aggregation.shape`, 1 without one; a collective call with one."""
    shape, answers, views = config.algorithm.aggregation.shape, update_batch.answers, update_batch.views
    scored = views.scored.any(0)
    if shape is None:
        return torch.ones_like(scored, dtype=torch.float32)
    tokens = Tokens(
        advantage=update_batch.advantage.float(),
        group=update_batch.group,
        ids=answers.ids[:, answers.prompt_length :],
        scored=scored,
        step=update_batch.step,
        measure=torch.zeros_like(scored, dtype=torch.float32) if update_batch.measure is None else update_batch.measure,
    )
    shape = shape.at(config.train.done_at(batch.iteration))
    return shape_tokens(shape, tokens, collectives.gather, collectives.accelerator.process_index)


def _choose(config: TextConfig, update_batch: UpdateBatch, collectives: Collectives) -> Tensor | None:
    """Return the tokens (B, L) bool that `objective.covariance` chooses, None without one; a collective call with one."""
    covariance, views = getattr(config.algorithm.objective, "covariance", None), update_batch.views
    if covariance is None:
        return None
    assert update_batch.old is not None, "`needs_old` asked for it"
    tokens = ScoredTokens(
        advantage=update_batch.advantage.float(),
        scored=views.scored.any(0),
        log_prob=(views.weight * update_batch.old).sum(0),
        draw=token_draws(update_batch.answers, "covariance"),
    )
    return choose_tokens(covariance, tokens, collectives.gather, collectives.accelerator.process_index)


def _pull(config: TextConfig, update_batch: UpdateBatch, batch: Batch, collectives: Collectives) -> Tensor | None:
    """Return the weights (B, L) of `objective.distillation`, None without one; a collective call with one."""
    rule, branch = getattr(config.algorithm.objective, "distillation", None), update_batch.branch
    if rule is None:
        return None
    assert branch is not None, "the config asks for branches that are trained on once"
    tokens = BranchTokens(
        advantage=update_batch.advantage.float(),
        scored=update_batch.views.scored.any(0),
        origin=batch.branches.origins.to(branch.device)[branch],
    )
    options = {"gather": collectives.gather, "rank": collectives.accelerator.process_index}
    return pull_tokens(rule, tokens, config.train.done_at(batch.iteration), **options)


def _balance(config: TextConfig, policy: TextPolicy, update_batch: UpdateBatch, collectives: Collectives) -> Objective:
    """Return the objective of an optimizer step: with `balance` its clip range is found, by a collective call."""
    objective, views, old = config.algorithm.objective, update_batch.views, update_batch.old
    if not isinstance(objective, TokenRatio) or objective.balance is None:
        return objective
    moved = torch.zeros_like(views.weight) if old is None else log_probs(policy, update_batch, config) - old
    advantage, scored = update_batch.advantage.float(), views.scored.any(0)
    each = (advantage if advantage.ndim == 2 else advantage[:, None]).expand(scored.shape)
    return objective.balanced((views.weight * moved).sum(0)[scored], each[scored], collectives.sum)


def _committed(update_batch: UpdateBatch, rollout: Rollout) -> Tensor:
    """Return log p (n, B, L) of the tokens that each view scores, as the decoder recorded it."""
    logp = rollout.commit_logp[update_batch.rows.to(rollout.commit_logp.device)]
    return logp.to(update_batch.views.weight).where(update_batch.views.scored, 0.0)


def _schedule_loss(objective: Objective, schedule: SchedulePolicy, update_batch: UpdateBatch, batch: Batch) -> Tensor:
    """Return the loss of the schedule's actions: a mean over a completion's steps, then a weighted sum over completions."""
    actions, rows = batch.actions, update_batch.rows
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
