"""Rollouts of texts: complete prompts, score the completions, and give hints to failed groups."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import compress, groupby
from typing import Any, Protocol, TypeVar

import torch

from flowgrpo.data.prompts import Row
from flowgrpo.mdlm.config import TextConfig
from flowgrpo.mdlm.decoding.decode import Decoder, Rollout
from flowgrpo.mdlm.methods.credit import Earned
from flowgrpo.mdlm.methods.hints import Inpainting, draw_hints, replace_failed
from flowgrpo.mdlm.methods.schedules.learned_schedule import Actions, SchedulePolicy, apply_actions
from flowgrpo.mdlm.methods.trees import Branches, grow
from flowgrpo.mdlm.policy import Completions, TextPolicy
from flowgrpo.training.advantages.reward_combination import Combination
from flowgrpo.training.distributed.assignment import Assignment, Member
from flowgrpo.training.prompts.failed_groups import failed_groups
from flowgrpo.training.prompts.prompt_groups import Groups
from flowgrpo.training.run.phases import phase
from flowgrpo.training.scoring.group_scores import Gather, Piece, PieceScoring, are_remote
from flowgrpo.training.scoring.scorer import Scores, score
from rewards import Reward

Tensor = torch.Tensor
T = TypeVar("T")
LOGGER = logging.getLogger(__name__)
BROKEN = "%d of %d answers have a log-probability that is not finite and are %s"


class Drawn(Protocol):
    """An engine's report on the tokens that it drew."""

    @property
    def correction(self) -> Tensor:
        """Importance weight (B, L) of each token, which corrects for the engine's own numerics and weights."""

    def line(self, run: Any, scored: Tensor) -> dict[str, Any]:
        """Return the metrics of the mismatch between engine and policy; `scored` (B, L) bool are the trained tokens."""


Rolled = tuple[Rollout, Drawn | None]  # completions of an engine, and its report on them


@dataclass(frozen=True, kw_only=True)
class Batch:
    """This process's scored completions of an iteration."""

    iteration: int  # counted from 0
    groups: Groups  # of the iteration, on all processes
    members: list[Member]  # (B,) group of each completion, and its index in the group
    branches: Branches  # of the completions
    rows: list[Row]  # (B,) prompts
    completions: Completions
    scores: Scores
    decoder: Decoder  # the decoder of the completions
    actions: Actions | None  # actions of a learned schedule; None without one
    unhelped: Tensor  # (B, R) rewards before hinted completions replaced any
    hinted: int | None  # number of completions that hinted ones replaced; None without hints
    drafts: Tensor | None = None  # (B, T, R) rewards of the model's predictions at each step; None if not scored
    engine: Drawn | None = None  # an engine's report on its tokens; None without one
    first: tuple[Tensor, list[Member]] | None = None  # outcomes of the first stage; None if there is one stage

    @property
    def group(self) -> Tensor:
        """(B,) int64 group of each completion."""
        return torch.tensor([group for group, _ in self.members])

    def earned(self, combination: Combination) -> Earned:
        """Return the completions with their rewards, of the kind that the combination compares."""
        drafts = self.drafts
        if drafts is not None:
            drafts = combination.columns(drafts.flatten(0, 1)).unflatten(0, drafts.shape[:2])
        rewards = combination.columns(self.scores.values)
        return Earned(branches=self.branches, rollout=self.completions.rollout, rewards=rewards, drafts=drafts)

    @property
    def outcomes(self) -> tuple[Tensor, list[Member]]:
        """Rewards (B, R) of the policy's own completions in the first stage, and the group and index of each."""
        return self.first or (self.unhelped, list(self.members))

    @property
    def decoded(self) -> int:
        """Number of completions."""
        return len(self.rows)

    @property
    def counts(self) -> dict[str, int]:
        """The metrics of hinted completions and of a second stage; {} without both."""
        hinted = {} if self.hinted is None else {"reward/hinted": self.hinted}
        staged = {} if self.first is None else {"prompts/second_stage": len(self.members) - len(self.first[1])}
        return hinted | staged

    def join(self, groups: Groups, further: Batch | None) -> Batch:
        """Return the batch with the completions of a second stage, in the order of groups; None if there are none here.

        `groups` are of both stages.
        """
        both = replace(self, groups=groups, first=self.outcomes)
        return both if further is None else _merge(both, further)


def scores_engine(config: TextConfig, decoder: Decoder) -> bool:
    """Return whether our model scores an engine's tokens: for the importance weights, or as old log-probabilities."""
    section = config.run.engine
    assert section is not None, "only runs with an engine call this"
    return section.log_probs or config.algorithm.likelihood.recorded(decoder)


def rollout(
    config: TextConfig,
    policy: TextPolicy,
    *,
    iteration: int,
    groups: Groups,
    members: list[Member],
    rows: list[Row],
    rewards: Sequence[Reward],
    decoder: Decoder,
    schedule: SchedulePolicy | None,
    rolled: Rolled | None = None,
    assignment: Assignment | None = None,
    gather: Gather = list,
) -> Batch:
    """Decode and score a completion of each row, and give hints to groups without a success.

    With hints, all rows of a group must be on this process, with trees all rows of a tree. `members` (B,) are the group of
    each row and its index in the group, in the order of groups. `rolled` are completions of an engine, in place of the
    policy's. For `assignment` and `gather` see `PieceScoring`.

    If all rewards wait for other machines, a group is scored as soon as its answers are complete, while the model decodes
    the others. All calls are the same as otherwise.
    """
    seeds = [(config.run.seed, "answer", iteration, *member) for member in members]
    scores_drafts = config.algorithm.credit.name == "step_gain"
    actions = None if schedule is None else schedule.draw(seeds)
    acting = decoder if actions is None else apply_actions(decoder, actions)
    branching = config.algorithm.tree.branching(acting)
    with PieceScoring(rewards, assignment, gather) as scoring:
        answers = _Answers(scoring, policy, rows, members)
        if rolled is None:
            completions = policy.generate(
                [row.prompt for row in rows],
                acting,
                seeds,
                config.train.rollout_rows,
                branching=branching,
                drafts=scores_drafts,
                landed=answers.take if are_remote(rewards) else None,
            )
        else:
            completions = Completions(rolled[0], policy.texts(rolled[0].completion))
        scores = answers.scores(completions)
    drafts = None
    if scores_drafts:
        drafts = _score_drafts(rewards, policy, completions, rows=rows, members=members)
        lean = replace(completions.rollout, drafts=completions.rollout.drafts[:, :0].clone())  # the update needs none
        completions = replace(completions, rollout=lean)
    batch = Batch(
        iteration=iteration,
        groups=groups,
        members=members,
        branches=grow(members, branching.factor, branching.depth),
        rows=rows,
        completions=completions,
        scores=scores,
        decoder=acting,
        actions=actions,
        unhelped=scores.values,
        hinted=None,
        drafts=drafts,
        engine=None if rolled is None else rolled[1],
    )
    hints = config.algorithm.hints
    if not isinstance(hints, Inpainting):
        return batch
    return _help(config, policy, replace(batch, hinted=0), settings=hints, rewards=rewards, decoder=decoder)


class _Answers:
    """The answers of a rollout on their way to the rewards, one call per group."""

    def __init__(self, scoring: PieceScoring, policy: TextPolicy, rows: Sequence[Row], members: Sequence[Member]):
        self._scoring, self._policy, self._rows, self._members = scoring, policy, rows, members
        by_group = groupby(range(len(members)), key=lambda answer: members[answer][0])
        self._groups = deque((group, list(answers)) for group, answers in by_group)

    def take(self, completion: Tensor, done: int) -> None:
        """Begin to score the groups whose answers are among the first `done` rows of `completion` (B, L)."""
        self._add(done, lambda answers: self._policy.texts(completion[answers]))

    def scores(self, completions: Completions) -> Scores:
        """Return the scores of all answers; one with a log-probability that is not finite counts as lost."""
        with phase("rewards"):
            self._add(len(completions.texts), lambda answers: [completions.texts[answer] for answer in answers])
            scores = self._scoring.scores()
        broken = ~completions.rollout.commit_logp.isfinite().all(1).cpu()
        if broken.any():
            LOGGER.warning(BROKEN, int(broken.sum()), len(broken), "dropped")
        return Scores(scores.values.masked_fill(broken[:, None], torch.nan), scores.lost | broken, scores.seconds)

    def _add(self, done: int, texts: Callable[[list[int]], list[str]]) -> None:
        while self._groups and self._groups[0][1][-1] < done:
            group, answers = self._groups.popleft()
            places, rows = [self._members[answer][1] for answer in answers], [self._rows[answer] for answer in answers]
            self._scoring.add(Piece(group, places, texts(answers), rows))


def _score_drafts(
    rewards: Sequence[Reward],
    policy: TextPolicy,
    completions: Completions,
    *,
    rows: Sequence[Row],
    members: Sequence[Member],
) -> Tensor:
    """Return the rewards (B, T, R) of the predictions before each step, NaN behind a row's steps.

    Equal predictions of an answer are scored once, those of a group in one call.
    """
    rollout = completions.rollout
    steps, drafts = rollout.steps.tolist(), rollout.drafts[:, : int(rollout.steps.max())]
    values = torch.full((*drafts.shape[:2], len(rewards)), torch.nan, dtype=torch.float64)
    for _, of_group in groupby(range(len(steps)), key=lambda answer: members[answer][0]):
        texts: dict[tuple[int, str], list[int]] = {}  # (answer, text) -> steps before which it is predicted
        for answer in of_group:
            for step, text in enumerate(policy.texts(drafts[answer, : steps[answer]].long())):
                texts.setdefault((answer, text), []).append(step)
        with phase("rewards"):
            scores = score(rewards, [text for _, text in texts], [rows[answer] for answer, _ in texts], one_group=False)
        for ((answer, _), predicted), value in zip(texts.items(), scores.values, strict=True):
            values[answer, predicted] = value
    return values


def _help(
    config: TextConfig,
    policy: TextPolicy,
    batch: Batch,
    *,
    settings: Inpainting,
    rewards: Sequence[Reward],
    decoder: Decoder,
) -> Batch:
    """Replace completions of failed groups by hinted ones that succeed."""
    deciding = [reward.name for reward in rewards].index(settings.reward) if settings.reward else 0
    failed = set(failed_groups(batch.scores.values[:, deciding], batch.group.tolist(), settings.success))
    retried = [
        index
        for index, ((group, _), row) in enumerate(zip(batch.members, batch.rows, strict=True))
        if group in failed and row.columns.get(settings.column)
    ]
    if not retried:
        return batch
    seeds = [(config.run.seed, "hinted", batch.iteration, *batch.members[index]) for index in retried]
    mask_id = policy.predictor.mask_id
    solutions = [
        torch.tensor(policy.tokens(batch.rows[index].columns[settings.column]), dtype=torch.long, device=policy.device)
        for index in retried
    ]
    fixed = draw_hints(settings, solutions, length=policy.length, mask_id=mask_id, seeds=seeds)
    hinted = (fixed != mask_id).any(1)
    if not hinted.any():  # the solutions are too short for hints
        return batch
    fixed = fixed[hinted]
    retried, seeds = list(compress(retried, hinted.tolist())), list(compress(seeds, hinted.tolist()))
    rows, members = [batch.rows[index] for index in retried], [batch.members[index] for index in retried]
    completions = policy.generate([row.prompt for row in rows], decoder, seeds, config.train.rollout_rows, fixed=fixed)
    with PieceScoring(rewards) as scoring:
        scores = _Answers(scoring, policy, rows, members).scores(completions)
    succeeded = scores.values[:, deciding]
    sizes = Counter(group for group, _ in batch.members)
    pairs = []
    for group in dict.fromkeys(group for group, _ in members):
        places = [index for index, member in enumerate(members) if member[0] == group]
        pairs += [(retried[places[a]], places[b]) for a, b in replace_failed(succeeded[places], settings, sizes[group])]
    return _replace_completions(batch, completions, scores, pairs)


def _merge(batch: Batch, further: Batch) -> Batch:
    """Return the batch with the completions of a second stage, all sorted by group and index."""
    members = batch.members + further.members
    order = sorted(range(len(members)), key=members.__getitem__)

    def pick(own: Sequence[T], others: Sequence[T]) -> list[T]:
        both = [*own, *others]
        return [both[place] for place in order]

    def stack(own: Tensor, others: Tensor) -> Tensor:
        return torch.cat([own, others])[order]

    first, later = batch.completions, further.completions
    width = max(first.rollout.prompt, later.rollout.prompt)
    rollouts = [_pad_prompts(each.rollout, width) for each in (first, later)]
    tensors = {field.name: stack(*(getattr(each, field.name) for each in rollouts)) for field in fields(Rollout)}
    scores = Scores(
        stack(batch.scores.values, further.scores.values),
        stack(batch.scores.lost, further.scores.lost),
        batch.scores.seconds + further.scores.seconds,
    )
    actions, drafts = batch.actions, batch.drafts
    if actions is not None and further.actions is not None:
        drawn = (
            stack(getattr(actions, name), getattr(further.actions, name)) for name in ("raw", "values", "log_prob")
        )
        actions = Actions(actions.names, *drawn)
    if drafts is not None and further.drafts is not None:
        steps = max(drafts.shape[1], further.drafts.shape[1])
        drafts = stack(*(_pad_steps(each, steps) for each in (drafts, further.drafts)))
    of_both = sorted(members)
    return replace(
        batch,
        members=of_both,
        branches=grow(of_both, batch.branches.factor, batch.branches.edge.shape[1] - 1),
        rows=pick(batch.rows, further.rows),
        completions=Completions(Rollout(**tensors), pick(first.texts, later.texts)),
        scores=scores,
        decoder=batch.decoder if actions is None else apply_actions(batch.decoder, actions),
        actions=actions,
        unhelped=scores.values,
        drafts=drafts,
    )


def _pad_prompts(rollout: Rollout, width: int) -> Rollout:
    """Return the rollout with prompts of `width` columns, padded on the left."""
    pad = (width - rollout.prompt, 0)
    ids, mask = (torch.nn.functional.pad(each, pad) for each in (rollout.ids, rollout.attention_mask))
    return replace(rollout, ids=ids, attention_mask=mask)


def _pad_steps(drafts: Tensor, steps: int) -> Tensor:
    """Return rewards (B, T, R) of predictions with T = `steps`; a row has none behind its own steps."""
    return torch.nn.functional.pad(drafts, (0, 0, 0, steps - drafts.shape[1]), value=torch.nan)


def _replace_completions(
    batch: Batch, completions: Completions, scores: Scores, pairs: Sequence[tuple[int, int]]
) -> Batch:
    """For each pair (i, j) replace completion i of the batch by completion j of `completions`, and its scores too."""
    if not pairs:
        return batch
    into, of = (torch.tensor(indices) for indices in zip(*pairs, strict=True))
    rollout = batch.completions.rollout
    hinted = _pad_prompts(completions.rollout, rollout.prompt)  # the batch may be padded to a longer prompt
    tensors = {}
    for field in fields(Rollout):
        tensor = getattr(rollout, field.name).clone()
        tensor[into] = getattr(hinted, field.name)[of]
        tensors[field.name] = tensor
    texts, values, lost = list(batch.completions.texts), batch.scores.values.clone(), batch.scores.lost.clone()
    for index, new in pairs:
        texts[index] = completions.texts[new]
    values[into], lost[into] = scores.values[of], scores.lost[of]
    both = Scores(values, lost, batch.scores.seconds + scores.seconds)
    return replace(batch, completions=Completions(Rollout(**tensors), texts), scores=both, hinted=len(pairs))
