"""A reward learnt from a person's votes on pairs of pictures or films.

`flowgrpo vote` writes the file of votes. Unlike a preference network (PickScore, HPS), the model is linear in the features
of another reward, so a few dozen votes suffice. It is learnt from the file on first use.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rewards.base import RewardError, load_nested
from rewards.compute import batched
from rewards.files import media

LOGGER = logging.getLogger(__name__)
OUTCOMES = {"a": 1.0, "b": 0.0, "neither": 0.5}
STRENGTHS = tuple(10.0**power for power in range(-2, 4))  # of the prior; all are tried
FOLDS = 10
FEWEST = 5  # smallest number of votes for a or b
AT_ONCE = 16  # samples


@dataclass(frozen=True)
class Vote:
    """A vote on two samples of a prompt; `outcome` is 1 for the first, 0 for the second, 0.5 for neither."""

    prompt: str
    first: Path
    second: Path
    outcome: float


def read_votes(file: Path) -> list[Vote]:
    """Read a file of `flowgrpo vote`, whose folder holds the samples; raise RewardError at the first bad line."""
    if not file.is_file():
        raise RewardError(f"votes: there is no file {file}; flowgrpo vote writes one")
    votes = []
    for number, line in enumerate(file.read_bytes().splitlines(), 1):
        try:
            row = json.loads(line)
            first, second = (file.parent / row[side] for side in ("a", "b"))
            votes.append(Vote(str(row["prompt"]), first, second, OUTCOMES[row["vote"]]))
        except (ValueError, KeyError, TypeError) as error:
            raise RewardError(
                f"votes: line {number} of {file} is no vote; one has prompt, a, b, and vote, one of {', '.join(OUTCOMES)}"
            ) from error
    return votes


@dataclass(frozen=True)
class Learned:
    """A preference: the log-odds of a sample against the mean of the samples voted on, (x - mean) / std @ weights."""

    mean: np.ndarray
    std: np.ndarray
    weights: np.ndarray
    _: KW_ONLY
    strength: float  # of the prior, chosen by the likelihood of held-out votes
    agreement: float  # share of the decided held-out votes that it predicts

    def __call__(self, features: np.ndarray) -> np.ndarray:
        """Return log-odds (B,) of features (B, D)."""
        return (features - self.mean) / self.std @ self.weights


def learn(first: np.ndarray, second: np.ndarray, outcomes: np.ndarray, prompts: Sequence[str] = ()) -> Learned:
    """Fit a Bradley-Terry model (1952) of preferences: P(first wins) = sigmoid(w (x_first - x_second)).

    Features (N, D) are standardised over all pictures voted on. w has a normal prior. Its strength maximises the likelihood
    of held-out votes in ten folds. A fold holds out whole prompts, since pairs of a prompt may share a picture; with one
    prompt or none it holds out single votes. A vote for neither (outcome 0.5) is half a win for each.
    """
    every = np.concatenate([first, second])
    mean, std = every.mean(0), every.std(0)
    std = np.where(std > 1e-9, std, 1.0)
    gaps = (first - second) / std
    groups = np.unique(prompts, return_inverse=True)[1] if len({*prompts}) > 1 else np.arange(len(gaps))
    folds = groups % FOLDS
    best: tuple[float, float, float] | None = None  # loss, strength, agreement
    for strength in STRENGTHS:
        odds = np.empty(len(gaps))
        for fold in np.unique(folds):
            odds[folds == fold] = gaps[folds == fold] @ fit(gaps[folds != fold], outcomes[folds != fold], strength)
        loss = float((np.logaddexp(0, odds) - outcomes * odds).mean())
        if best is None or loss < best[0]:
            decided = outcomes != 0.5
            right = np.where(odds == 0, 0.5, (odds > 0) == (outcomes > 0.5))[decided]
            best = loss, strength, float(right.mean()) if decided.any() else math.nan
    assert best is not None
    _, strength, agreement = best
    return Learned(mean, std, fit(gaps, outcomes, strength), strength=strength, agreement=agreement)


def fit(gaps: np.ndarray, outcomes: np.ndarray, strength: float) -> np.ndarray:
    """Return the maximum a posteriori weights (D,) for feature differences `gaps` (N, D), by Newton in their row space."""
    _, sizes, rows = np.linalg.svd(gaps, full_matrices=False)
    rows = rows[sizes > 1e-9 * max(sizes.max(initial=0.0), 1e-300)]
    inputs = gaps @ rows.T
    weights = np.zeros(inputs.shape[1])
    for _ in range(100):
        chance = 1 / (1 + np.exp(-np.clip(inputs @ weights, -500, 500)))
        gradient = inputs.T @ (chance - outcomes) + strength * weights
        curvature = (inputs.T * (chance * (1 - chance))) @ inputs + strength * np.eye(len(weights))
        step = np.linalg.solve(curvature, gradient)
        weights -= step * min(1.0, 10 / max(np.abs(inputs @ step).max(initial=0.0), 1e-12))
        if np.abs(step).max(initial=0.0) < 1e-10:
            break
    return weights @ rows


class Votes:
    """Log-odds that the votes of a file prefer a sample to the mean of the samples voted on. Positive is better.

    A warning is logged if the learnt preference predicts held-out votes hardly better than a coin.

        rewards: [{use: votes, options: {file: runs/demo/votes.jsonl, of: clip_score}}]

    Args:
        file: the votes, as `flowgrpo vote` writes them.
        of: the reward, or list of rewards, that gives the features: a name, a path or a map of `use` and `options`. The
            features (B, D) come from its method `features(samples, prompts)`, which `clip_score`, `pickscore`, `hpsv2` and
            `shapes` have. Any other reward has one feature, its score, so a list of rewards gets learnt weights.
    """

    def __init__(self, file: str, of: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] = "clip_score"):
        self.file = Path(file)
        complaint = "votes: `of` is a reward, or a list of them, each a name or a map of use and options"
        uses = [of] if isinstance(of, (str, Mapping)) else list(of)
        if not uses:
            raise RewardError(complaint)
        self._rewards = [load_nested(use, complaint) for use in uses]
        if waiting := [reward.name for reward in self._rewards if reward.group_wise]:
            raise RewardError(f"votes: {waiting[0]} compares the samples of a group, and has no features of one")
        self.votes = read_votes(self.file)
        decided = sum(vote.outcome != 0.5 for vote in self.votes)
        if decided < FEWEST:
            raise RewardError(f"votes: {self.file} has {decided} votes for one of two, and {FEWEST} are the fewest")
        self._learned: Learned | None = None

    def to(self, device: torch.device | str) -> Votes:
        """Move the rewards that give the features to a device, and learn the preference."""
        for reward in self._rewards:
            if hasattr(reward.function, "to"):
                reward.function.to(device)
        self.learned()
        return self

    def learned(self) -> Learned:
        """Return the learnt preference; the first call learns it."""
        if self._learned is None:
            first, second = ([self._read_features(vote, side) for vote in self.votes] for side in ("first", "second"))
            outcomes = np.array([vote.outcome for vote in self.votes])
            prompts = [vote.prompt for vote in self.votes]
            self._learned = learn(np.concatenate(first), np.concatenate(second), outcomes, prompts)
            decided = sum(vote.outcome != 0.5 for vote in self.votes)
            if self._learned.agreement < 0.5 + 1 / math.sqrt(decided):  # two standard errors of a coin
                share = f"{100 * self._learned.agreement:.0f}% of {decided} held-out votes"
                advice = "hardly more than a coin; give more votes, or other features in `of`"
                LOGGER.warning("votes: the reward learned from %s agrees with %s, %s", self.file, share, advice)
        return self._learned

    def __call__(self, images: torch.Tensor, prompts: Sequence[str]) -> list[float]:
        """Return log-odds of pictures (B, 3, H, W) or films (B, F, 3, H, W), float in [0, 1]."""
        learned = self.learned()
        parts = zip(batched(images, AT_ONCE), batched(prompts, AT_ONCE), strict=True)
        return [float(odds) for part, texts in parts for odds in learned(self._features(part, texts))]

    def _read_features(self, vote: Vote, side: str) -> np.ndarray:
        try:
            sample = torch.from_numpy(media.pixels(getattr(vote, side)))
        except (media.MediaError, OSError) as error:
            raise RewardError(f"votes: {error}") from error
        return self._features(sample[None], [vote.prompt])

    def _features(self, images: torch.Tensor, prompts: Sequence[str]) -> np.ndarray:
        """Return the features (B, D) of all rewards in float64; a reward without features gives its score."""
        parts = []
        for reward in self._rewards:
            part = reward.features(images, prompts).numpy()
            part = part[:, None] if part.ndim == 1 else part
            if part.shape[0] != len(prompts) or not np.isfinite(part).all():
                shape = f"{part.shape}, or not all of them finite"
                raise ValueError(f"features of {len(prompts)} samples came out as {shape}")
            parts.append(part)
        return np.concatenate(parts, axis=1)
