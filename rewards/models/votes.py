"""What a person's votes prefer, learned over features of pictures: a reward made of a file of pairs.

`flowgrpo vote` writes the file. How the model departs from a preference network (PickScore, HPS): it is linear over features
that another reward has, so that a few dozen votes suffice, and it is learned from the file when the reward is first asked.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rewards.base import RewardError, batched, load
from rewards.files.media import MediaError, picture

LOGGER = logging.getLogger(__name__)
OUTCOMES = {"a": 1.0, "b": 0.0, "neither": 0.5}
STRENGTHS = tuple(10.0**power for power in range(-2, 4))  # of the prior, tried
FOLDS = 10
FEWEST = 5  # votes that prefer one
AT_ONCE = 16  # pictures


@dataclass(frozen=True)
class Vote:
    """Two pictures of a prompt, and how much of a win it is for the first: 1, 0, or 0.5 for neither."""

    prompt: str
    first: Path
    second: Path
    outcome: float


def read_votes(file: Path) -> list[Vote]:
    """The votes of a file of `flowgrpo vote`, whose pictures lie beside it as its lines say.

    Raises:
        RewardError: there is no such file, or a line of it is no vote.
    """
    if not file.is_file():
        raise RewardError(f"votes: there is no file {file}; flowgrpo vote writes one")
    found = []
    for number, line in enumerate(file.read_bytes().splitlines(), 1):
        try:
            told = json.loads(line)
            first, second = (file.parent / told[side] for side in ("a", "b"))
            found.append(Vote(str(told["prompt"]), first, second, OUTCOMES[told["vote"]]))
        except (ValueError, KeyError, TypeError) as error:
            raise RewardError(
                f"votes: line {number} of {file} is no vote; one has prompt, a, b, and vote, one of {', '.join(OUTCOMES)}"
            ) from error
    return found


@dataclass(frozen=True)
class Learned:
    """A preference: log-odds of a sample against the mean of those that were voted on, (x - mean) / std @ weights.

    Attributes:
        strength: of the prior, chosen by held-out votes.
        agreement: share of the held-out votes for one of two that it agrees with.
    """

    mean: np.ndarray
    std: np.ndarray
    weights: np.ndarray
    _: KW_ONLY
    strength: float
    agreement: float

    def __call__(self, features: np.ndarray) -> np.ndarray:
        """Log-odds (B,) of features (B, D)."""
        return (features - self.mean) / self.std @ self.weights


def learn(first: np.ndarray, second: np.ndarray, outcomes: np.ndarray, prompts: Sequence[str] = ()) -> Learned:
    """Learn which of two is preferred (Bradley and Terry, 1952): P(first wins) = sigmoid(w (x_first - x_second)).

    Features are standardised over all that were voted on; w has a normal prior, whose strength is the one under which
    held-out votes are likeliest, in ten folds of whole prompts, for a picture may be in several pairs. A vote for neither
    counts as half a win for each.

    Args:
        first, second: (N, D) features.
        outcomes: (N,) 1, 0 or 0.5.
        prompts: of the pairs; those of one prompt, or without any each vote, are held out together.
    """
    every = np.concatenate([first, second])
    mean, std = every.mean(0), every.std(0)
    std = np.where(std > 1e-9, std, 1.0)
    gaps = (first - second) / std
    own = np.unique(prompts, return_inverse=True)[1] if len({*prompts}) > 1 else np.arange(len(gaps))
    folds = own % FOLDS
    best: tuple[float, float, float] | None = None  # loss, strength, agreement
    for strength in STRENGTHS:
        odds = np.empty(len(gaps))
        for fold in np.unique(folds):
            odds[folds == fold] = gaps[folds == fold] @ fitted(gaps[folds != fold], outcomes[folds != fold], strength)
        loss = float((np.logaddexp(0, odds) - outcomes * odds).mean())
        if best is None or loss < best[0]:
            decided = outcomes != 0.5
            right = np.where(odds == 0, 0.5, (odds > 0) == (outcomes > 0.5))[decided]
            best = loss, strength, float(right.mean()) if decided.any() else math.nan
    assert best is not None
    _, strength, agreement = best
    return Learned(mean, std, fitted(gaps, outcomes, strength), strength=strength, agreement=agreement)


def fitted(gaps: np.ndarray, outcomes: np.ndarray, strength: float) -> np.ndarray:
    """The weights (D,) of the largest posterior, by Newton's method; the loss is convex.

    They lie in the span of the N gaps, so that what is solved has the smaller of N and D unknowns.
    """
    _, sizes, rows = np.linalg.svd(gaps, full_matrices=False)
    rows = rows[sizes > 1e-9 * max(sizes.max(initial=0.0), 1e-300)]
    seen = gaps @ rows.T
    weights = np.zeros(seen.shape[1])
    for _ in range(100):
        chance = 1 / (1 + np.exp(-np.clip(seen @ weights, -500, 500)))
        gradient = seen.T @ (chance - outcomes) + strength * weights
        curvature = (seen.T * (chance * (1 - chance))) @ seen + strength * np.eye(len(weights))
        step = np.linalg.solve(curvature, gradient)
        weights -= step * min(1.0, 10 / max(np.abs(seen @ step).max(initial=0.0), 1e-12))
        if np.abs(step).max(initial=0.0) < 1e-10:
            break
    return weights @ rows


class Votes:
    """What the votes of a file prefer: log-odds of a picture against the mean of those that were voted on.

    Positive is better. Where it agrees with hardly more held-out votes than a coin, a warning says so.

        rewards: [{use: votes, options: {file: runs/demo/votes.jsonl, of: clip_score}}]

    Args:
        file: of `flowgrpo vote`.
        of: the reward, or list of rewards, over whose features it is learned, as a config uses them: names, paths or maps
            of `use` and `options`. A reward with a method `features(samples, prompts)` gives those (B, D), such as
            `clip_score`, `pickscore`, `hpsv2` and `shapes`; of any other its score is the one feature, so that a list of
            rewards has their weights learned.

    Raises:
        RewardError: there is no such file, or too few votes in it; a picture cannot be read; a reward cannot be had.
    """

    def __init__(self, file: str, of: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] = "clip_score"):
        self.file = Path(file)
        uses = [of] if isinstance(of, (str, Mapping)) else list(of)
        maps: list[dict[str, Any]] = [{"use": use} if isinstance(use, str) else dict(use) for use in uses]
        if not maps or any(not isinstance(use.get("use"), str) or use.keys() - {"use", "options"} for use in maps):
            raise RewardError("votes: `of` is a reward, or a list of them, each a name or a map of use and options")
        self._rewards = [load(use["use"], options=use.get("options")) for use in maps]
        if waiting := [reward.name for reward in self._rewards if reward.group_wise]:
            raise RewardError(f"votes: {waiting[0]} compares the samples of a group, and has no features of one")
        self.votes = read_votes(self.file)
        decided = sum(vote.outcome != 0.5 for vote in self.votes)
        if decided < FEWEST:
            raise RewardError(f"votes: {self.file} has {decided} votes for one of two, and {FEWEST} are the fewest")
        self._learned: Learned | None = None

    def to(self, device: torch.device | str) -> Votes:
        """Move the models of the features, and learn."""
        for reward in self._rewards:
            if hasattr(reward.function, "to"):
                reward.function.to(device)
        self.learned()
        return self

    def learned(self) -> Learned:
        """What was learned; it is learned here, when it is first asked for."""
        if self._learned is None:
            first, second = ([self._of_file(vote, side) for vote in self.votes] for side in ("first", "second"))
            outcomes = np.array([vote.outcome for vote in self.votes])
            prompts = [vote.prompt for vote in self.votes]
            self._learned = learn(np.concatenate(first), np.concatenate(second), outcomes, prompts)
            decided = sum(vote.outcome != 0.5 for vote in self.votes)
            if self._learned.agreement < 0.5 + 1 / math.sqrt(decided):  # two standard errors of a coin
                LOGGER.warning(
                    "votes: what is learned from %s agrees with %.0f%% of %d held-out votes, hardly more than a coin; "
                    "give more votes, or other features in `of`",
                    self.file,
                    100 * self._learned.agreement,
                    decided,
                )
        return self._learned

    def __call__(self, images: torch.Tensor, prompts: Sequence[str]) -> list[float]:
        """Log-odds of pictures, float (B, 3, H, W) in [0, 1]."""
        learned = self.learned()
        parts = zip(batched(images, AT_ONCE), batched(prompts, AT_ONCE), strict=True)
        return [float(odds) for part, own in parts for odds in learned(self._features(part, own))]

    def _of_file(self, vote: Vote, side: str) -> np.ndarray:
        try:
            pixels = np.asarray(picture(getattr(vote, side)), dtype=np.float32) / 255
        except (MediaError, OSError) as error:
            raise RewardError(f"votes: {error}") from error
        return self._features(torch.from_numpy(pixels).movedim(-1, 0)[None], [vote.prompt])

    def _features(self, images: torch.Tensor, prompts: Sequence[str]) -> np.ndarray:
        return np.concatenate([_features_of(reward.function, images, prompts) for reward in self._rewards], axis=1)


def _features_of(function: Callable[..., Any], images: torch.Tensor, prompts: Sequence[str]) -> np.ndarray:
    """Features (B, D) float64 of a reward, or its score (B, 1)."""
    own = getattr(function, "features", None)
    with torch.no_grad():
        found = function(images, prompts) if own is None else own(images, prompts)
    values = torch.as_tensor(found, dtype=torch.float64).cpu().numpy()
    values = values[:, None] if values.ndim == 1 else values
    if values.shape[0] != len(prompts) or not np.isfinite(values).all():
        raise ValueError(f"features of {len(prompts)} pictures came out as {values.shape}, or not all of them finite")
    return values
