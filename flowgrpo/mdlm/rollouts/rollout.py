"""Rollouts of texts: complete the prompts of an iteration, score the completions, and help groups that failed by hints."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import compress, groupby
from typing import Any, Protocol

import torch

from flowgrpo.data.prompts import Row
from flowgrpo.mdlm.config import TextConfig
from flowgrpo.mdlm.decoding.decode import Decoder, Rollout
from flowgrpo.mdlm.methods.hints import Inpainting, draw_hints, failed_groups, replace_failed
from flowgrpo.mdlm.methods.schedules.learned_schedule import Actions, SchedulePolicy, scheduled
from flowgrpo.mdlm.policy import Completions, TextPolicy
from flowgrpo.training.advantages.prompt_groups import Groups
from flowgrpo.training.distributed.assignment import Assignment
from flowgrpo.training.distributed.minibatches import Member
from flowgrpo.training.run.phases import phase
from flowgrpo.training.scoring.group_scores import Gather, Piece, score_pieces
from flowgrpo.training.scoring.scorer import Scores
from rewards import Reward

Tensor = torch.Tensor
LOGGER = logging.getLogger(__name__)
BROKEN = "%d of %d answers have a log-probability that is not finite and are %s"


class Drawn(Protocol):
    """What an engine tells of the tokens that it drew."""

    @property
    def correction(self) -> Tensor:
        """Weight (B, L) of each token for having been drawn by another policy."""

    def line(self, run: Any, scored: Tensor) -> dict[str, Any]:
        """Metrics of the mismatch between the engine and the policy, of the tokens (B, L) bool that are trained on."""


Rolled = tuple[Rollout, Drawn | None]  # completions of an engine, and what it tells of them


@dataclass(frozen=True, kw_only=True)
class Batch:
    """This process's completions of an iteration, scored.

    Attributes:
        iteration: counted from 0.
        groups: of the iteration, on all processes.
        members: (B,) group of each completion, and its index in the group.
        rows: (B,) prompts.
        completions: what was decoded, a completion of each row.
        scores: their rewards.
        decoder: that made them.
        actions: of the schedule, or None.
        unhelped: (B, R) the rewards before hints changed anything.
        hinted: how many completions were replaced by ones that were given parts of a solution; None without hints.
        engine: what an engine tells of the tokens that it drew; None where it tells nothing.
    """

    iteration: int
    groups: Groups
    members: list[Member]
    rows: list[Row]
    completions: Completions
    scores: Scores
    decoder: Decoder
    actions: Actions | None
    unhelped: Tensor
    hinted: int | None
    engine: Drawn | None = None

    @property
    def group(self) -> Tensor:
        """(B,) int64 group of each completion."""
        return torch.tensor([group for group, _ in self.members])

    @property
    def outcomes(self) -> tuple[Tensor, list[int]]:
        """Rewards (B, R) of what the policy made by itself, and the group of each."""
        return self.unhelped, self.group.tolist()

    @property
    def decoded(self) -> int:
        """How many completions it has."""
        return len(self.rows)

    @property
    def counts(self) -> dict[str, int]:
        """The number of hinted completions, where there are hints."""
        return {} if self.hinted is None else {"reward/hinted": self.hinted}


def scores_engine(config: TextConfig, decoder: Decoder) -> bool:
    """Return whether an engine's tokens need our own log-probabilities: for the correction, or for the update's ratios."""
    section = config.run.engine
    assert section is not None, "asked of runs with an engine"
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
    """Decode and score a completion of each row, and help the groups of which none succeeded, which are whole here then.

    Args:
        members: (B,) group of each row, and its index in the group; rows of one group follow each other.
        schedule: the policy of the decoder's numbers, or None.
        rolled: what an engine decoded of the rows in the place of the policy; None where none did.
        deal, gather: see `score_pieces`.
    """
    seeds = [(config.run.seed, "answer", iteration, *member) for member in members]
    actions = None if schedule is None else schedule.draw(seeds)
    acting = decoder if actions is None else scheduled(decoder, actions)
    if rolled is None:
        completions = policy.generate([row.prompt for row in rows], acting, seeds, config.train.rollout_rows)
    else:
        completions = Completions(rolled[0], policy.texts(rolled[0].completion))
    scores = _score(rewards, completions, rows, members, assignment=assignment, gather=gather)
    batch = Batch(
        iteration=iteration,
        groups=groups,
        members=members,
        rows=rows,
        completions=completions,
        scores=scores,
        decoder=acting,
        actions=actions,
        unhelped=scores.values,
        hinted=None,
        engine=None if rolled is None else rolled[1],
    )
    hints = config.algorithm.hints
    if not isinstance(hints, Inpainting):
        return batch
    return _help(config, policy, replace(batch, hinted=0), settings=hints, rewards=rewards, decoder=decoder)


def _score(
    rewards: Sequence[Reward],
    completions: Completions,
    rows: Sequence[Row],
    members: Sequence[Member],
    *,
    assignment: Assignment | None = None,
    gather: Gather = list,
) -> Scores:
    """Rewards of completions, a call for each group; lost where a token's log-probability is not a number."""
    numbered = zip(members, completions.texts, rows, strict=True)
    pieces = []
    for group, own in groupby(numbered, key=lambda each: each[0][0]):
        of_group, texts, rows_of_group = zip(*own, strict=True)
        pieces.append(Piece(group, [index for _, index in of_group], list(texts), rows_of_group))
    with phase("rewards"):
        scores = score_pieces(rewards, pieces, assignment, gather)
    broken = ~completions.rollout.commit_logp.isfinite().all(1).cpu()
    if broken.any():
        LOGGER.warning(BROKEN, int(broken.sum()), len(broken), "dropped")
    return Scores(scores.values.masked_fill(broken[:, None], torch.nan), scores.lost | broken, scores.seconds)


def _help(
    config: TextConfig,
    policy: TextPolicy,
    batch: Batch,
    *,
    settings: Inpainting,
    rewards: Sequence[Reward],
    decoder: Decoder,
) -> Batch:
    """The batch with completions of failed groups replaced by ones that hints led to a success."""
    deciding = [reward.name for reward in rewards].index(settings.reward) if settings.reward else 0
    failed = set(failed_groups(batch.scores.values[:, deciding], batch.group.tolist(), settings.success))
    asked = [
        index
        for index, ((group, _), row) in enumerate(zip(batch.members, batch.rows, strict=True))
        if group in failed and row.columns.get(settings.column)
    ]
    if not asked:
        return batch
    seeds = [(config.run.seed, "hinted", batch.iteration, *batch.members[index]) for index in asked]
    mask_id = policy.predictor.mask_id
    solutions = [
        torch.tensor(policy.tokens(batch.rows[index].columns[settings.column]), dtype=torch.long, device=policy.device)
        for index in asked
    ]
    fixed = draw_hints(settings, solutions, length=policy.length, mask_id=mask_id, seeds=seeds)
    given = (fixed != mask_id).any(1)
    if not given.any():  # the solutions are too short for hints
        return batch
    fixed = fixed[given]
    asked, seeds = list(compress(asked, given.tolist())), list(compress(seeds, given.tolist()))
    rows, members = [batch.rows[index] for index in asked], [batch.members[index] for index in asked]
    completions = policy.generate([row.prompt for row in rows], decoder, seeds, config.train.rollout_rows, fixed=fixed)
    scores = _score(rewards, completions, rows, members)
    succeeded = scores.values[:, deciding]
    sizes = Counter(group for group, _ in batch.members)
    pairs = []
    for group in dict.fromkeys(group for group, _ in members):
        own = [index for index, member in enumerate(members) if member[0] == group]
        pairs += [(asked[own[a]], own[b]) for a, b in replace_failed(succeeded[own], settings, sizes[group])]
    return _replace_completions(batch, completions, scores, pairs)


def _replace_completions(
    batch: Batch, completions: Completions, scores: Scores, pairs: Sequence[tuple[int, int]]
) -> Batch:
    """A batch with some completions (first of a pair) replaced by others (second)."""
    if not pairs:
        return batch
    into, of = (torch.tensor(indices) for indices in zip(*pairs, strict=True))
    rollout = batch.completions.rollout
    wider = rollout.prompt - completions.rollout.prompt  # the prompts of all completions may be padded to more
    tensors = {}
    for field in fields(Rollout):
        own, new = getattr(rollout, field.name).clone(), getattr(completions.rollout, field.name)[of]
        own[into] = torch.nn.functional.pad(new, (wider, 0)) if field.name in ("ids", "attention_mask") else new
        tensors[field.name] = own
    texts, values, lost = list(batch.completions.texts), batch.scores.values.clone(), batch.scores.lost.clone()
    for index, new in pairs:
        texts[index] = completions.texts[new]
    values[into], lost[into] = scores.values[of], scores.lost[of]
    both = Scores(values, lost, batch.scores.seconds + scores.seconds)
    return replace(batch, completions=Completions(Rollout(**tensors), texts), scores=both, hinted=len(pairs))
