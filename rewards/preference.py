"""Pairwise preference: how often a sample wins against the others of its group (Pref-GRPO, arXiv 2508.20751)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from rewards.base import RewardError, load, locate
from rewards.process_state import kept
from rewards.served.chat import Chat, pictures, text
from rewards.served.judge import filled

TEMPLATE = (
    "Both were generated from the description between the lines.\n---\n{prompt}\n---\n"
    "Which one is better: which follows the description more closely or, if they are level in that, which one is better "
    "made? Answer 1 for the first, 2 for the second, tie if neither is."
)
ANSWERS = {"1": 1.0, "2": 0.0, "tie": 0.5}


class Preference:
    """The win rate of each sample of a group over all pairs: wins / (group size - 1), in [0, 1]; ties count one half.

    The published form shows each pair once, in the order of the group, so that a judge who favours a position favours the
    early or the late samples; `both_orders` shows it both ways, which makes that cancel, for twice the questions. An answer
    that cannot be read counts as a tie, as published. Where the published form rounds to three places, we do not.

    A group of one, as in evaluation, has nothing to be compared with: None.

    Args:
        endpoint: URL of an OpenAI-compatible endpoint; see `rewards.served.judge.Judge`. This, `compare` or `scores`.
        compare: a function of your own in the endpoint's place, `./file.py:function` or `pkg.module:function`, called with
            two samples and their prompt: 1 where the first is better, 0 where the second is, between these for degrees,
            None where it cannot tell.
        scores: a reward whose scores are log-odds, such as `votes`, as a config uses it: a name, a path or a map of `use`
            and `options`. A win is the probability sigmoid(s_first - s_second).
        both_orders: whether each pair is shown both ways.
        model, method, frames, options: see `rewards.served.judge.Judge`; `logprobs` makes a win the probability of it.
        template: the question, behind the pictures; {prompt} and the names of columns in braces are filled in.
        answers: what may be answered, and how much of a win for the first it is.

    Attributes:
        rounds: comparisons so far.
        undecided: comparisons so far whose answer could not be read.

    Raises:
        RewardError: the endpoint or the function cannot be had, or an option does not fit.
    """

    group_wise = True

    def __init__(
        self,
        endpoint: str | None = None,
        compare: str | Callable[[torch.Tensor, torch.Tensor, str], float | None] | None = None,
        *,
        scores: str | Mapping[str, Any] | None = None,
        both_orders: bool = True,
        model: str | None = None,
        method: str = "guided",
        frames: int = 4,
        template: str = TEMPLATE,
        answers: Mapping[str, float] | None = None,
        **options: Any,
    ):
        given = {"endpoint": endpoint, "compare": compare, "scores": scores}
        given = [name for name, value in given.items() if value is not None]
        if len(given) != 1:
            raise RewardError(
                "preference needs either an endpoint or a function to compare, or scores, and one of them alone: options: "
                "{endpoint: http://...}"
            )
        if endpoint is None and options:
            raise RewardError(f"preference by {given[0]} asks no endpoint and takes no {', '.join(options)}")
        use: dict[str, Any] = {"use": scores} if isinstance(scores, str) else dict(scores or {})
        if scores is not None and (not isinstance(use.get("use"), str) or use.keys() - {"use", "options"}):
            raise RewardError("preference: scores is a reward, a name or a map of use and options")
        self.scores = None if scores is None else load(use["use"], options=use.get("options"))
        if self.scores is not None and self.scores.group_wise:
            raise RewardError(f"preference: {self.scores.name} compares the samples of a group, and scores none alone")
        self.compare = locate(compare, "compare") if isinstance(compare, str) else compare
        self.chat = Chat(answers or ANSWERS, endpoint, model=model, method=method, **options) if endpoint else None
        self.both_orders, self.frames, self.template = both_orders, frames, template
        self.remote = endpoint is not None  # waits for others, and tries again by itself
        self.rounds = self.undecided = 0

    def to(self, device: torch.device | str) -> Preference:
        """Move the model of `scores`, where there is one."""
        if self.scores is not None and hasattr(self.scores.function, "to"):
            self.scores.function.to(device)
        return self

    def __call__(self, samples: torch.Tensor, prompts: Sequence[str], **columns: Sequence[Any]) -> list[float | None]:
        """Win rates of one group, images (G, 3, H, W) or videos (G, F, 3, H, W) in [0, 1] of one prompt.

        Raises:
            RewardError: the endpoint failed, or `compare` returned no number between 0 and 1.
            ValueError: the samples are of several prompts.
        """
        if len(set(prompts)) > 1:
            raise ValueError(f"preference compares samples of one prompt, not of {len(set(prompts))}")
        size = len(prompts)
        if size == 1:
            return [None]
        pairs = list(itertools.combinations(range(size), 2))
        both = self.both_orders and self.scores is None  # scores know no order
        shown = [*pairs, *((j, i) for i, j in pairs)] if both else pairs
        row = {name: values[0] for name, values in columns.items()}
        if self.chat:
            outcomes = self._asked(samples, prompts[0], row, shown)
        elif self.scores is not None:
            odds = torch.as_tensor(self.scores(samples, prompts, columns), dtype=torch.float64)
            chances = (torch.sigmoid(odds[i] - odds[j]).item() for i, j in shown)
            outcomes = [None if math.isnan(chance) else chance for chance in chances]
        else:
            outcomes = self._compared(samples, prompts[0], shown)
        self.rounds += len(shown)
        self.undecided += outcomes.count(None)
        wins = torch.zeros(size, dtype=torch.float64)
        for (i, j), outcome in zip(shown, outcomes, strict=True):
            won = 0.5 if outcome is None else outcome
            wins[i] += won
            wins[j] += 1 - won
        return (wins / (len(shown) / len(pairs)) / (size - 1)).tolist()

    def _asked(
        self, samples: torch.Tensor, prompt: str, row: Mapping[str, Any], pairs: Sequence[tuple[int, int]]
    ) -> list[float | None]:
        assert self.chat is not None
        parts = [pictures(sample, self.frames) for sample in samples]
        question = text(filled(self.template, {**row, "prompt": prompt}))
        return self.chat.ask([[text("First:"), *parts[i], text("Second:"), *parts[j], question] for i, j in pairs])

    def _compared(self, samples: torch.Tensor, prompt: str, pairs: Sequence[tuple[int, int]]) -> list[float | None]:
        assert self.compare is not None
        with kept("the function that compares", self.compare, calls=True):
            outcomes = [self.compare(samples[i], samples[j], prompt) for i, j in pairs]
        for outcome in outcomes:
            if outcome is not None and not (isinstance(outcome, (int, float)) and 0 <= outcome <= 1):
                raise RewardError(f"compare returned {outcome!r}, not a number from 0 to 1 or None")
        return outcomes
