"""Pairwise preference: the share of a group's samples that a sample beats (Pref-GRPO, arXiv 2508.20751)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from rewards.base import RewardError, load_nested, locate
from rewards.process_state import preserve
from rewards.served.chat import Chat
from rewards.served.grading import fill_in, pictures, text

TEMPLATE = (
    "Both were generated from the description between the lines.\n---\n{prompt}\n---\n"
    "Which one is better: which follows the description more closely or, if they are level in that, which one is better "
    "made? Answer 1 for the first, 2 for the second, tie if neither is."
)
ANSWERS = {"1": 1.0, "2": 0.0, "tie": 0.5}
Pairs = Sequence[tuple[int, int]]  # of indices in a group


class Preference:
    """The win rate of each sample of a group over all pairs: wins / (group size - 1), in [0, 1]. A tie is half a win.

    The published form shows each pair once in the order of the group, so that a judge with a position bias favours early or
    late samples. `both_orders` shows each pair both ways, which cancels the bias at twice the questions. An answer that
    cannot be read is a tie, as published. The published form rounds to three places; this one does not.

    A group of one, as in evaluation, scores None. Set exactly one of `endpoint`, `compare` and `scores`.

    Args:
        endpoint: URL of an OpenAI-compatible endpoint; see `rewards.served.judge.Judge`.
        compare: your own function, `./file.py:function` or `pkg.module:function`. It gets two samples and their prompt and
            returns 1 if the first is better, 0 if the second is, a value between for degrees, None if it cannot tell.
        scores: a reward that returns log-odds, such as `votes`: a name, a path or a map of `use` and `options`. A win is
            the probability sigmoid(s_first - s_second).
        both_orders: show each pair in both orders.
        model, method, frames, options: see `rewards.served.judge.Judge`. With `logprobs` a win is its probability.
        template: the question after the pictures; {prompt} and column names in braces are replaced.
        answers: possible answers, each with the share of a win for the first sample.
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
        sources = {"endpoint": endpoint, "compare": compare, "scores": scores}
        given = [name for name, value in sources.items() if value is not None]
        if len(given) != 1:
            raise RewardError(
                "preference needs either an endpoint or a function to compare, or scores, and one of them alone: options: "
                "{endpoint: http://...}"
            )
        if endpoint is None and options:
            raise RewardError(f"preference by {given[0]} asks no endpoint and takes no {', '.join(options)}")
        complaint = "preference: scores is a reward, a name or a map of use and options"
        self.scores = None if scores is None else load_nested(scores, complaint)
        if self.scores is not None and self.scores.group_wise:
            raise RewardError(f"preference: {self.scores.name} compares the samples of a group, and scores none alone")
        self.compare = locate(compare, "compare") if isinstance(compare, str) else compare
        self.chat = Chat(answers or ANSWERS, endpoint, model=model, method=method, **options) if endpoint else None
        self.both_orders, self.frames, self.template = both_orders, frames, template
        self.remote = endpoint is not None  # waits for a server and retries by itself
        self.rounds = self.undecided = 0  # comparisons, and those whose answer could not be read

    def to(self, device: torch.device | str) -> Preference:
        """Move the model of `scores`, if any."""
        if self.scores is not None and hasattr(self.scores.function, "to"):
            self.scores.function.to(device)
        return self

    def __call__(self, samples: torch.Tensor, prompts: Sequence[str], **columns: Sequence[Any]) -> list[float | None]:
        """Return the win rates of one group of one prompt, images (G, 3, H, W) or videos (G, F, 3, H, W) in [0, 1]."""
        if len(set(prompts)) > 1:
            raise ValueError(f"preference compares samples of one prompt, not of {len(set(prompts))}")
        size = len(prompts)
        if size == 1:
            return [None]
        pairs = list(itertools.combinations(range(size), 2))
        both = self.both_orders and self.scores is None  # scores do not depend on the order
        shown = [*pairs, *((j, i) for i, j in pairs)] if both else pairs
        row = {name: values[0] for name, values in columns.items()}
        if self.chat:
            outcomes = self._ask(samples, prompts[0], row, shown)
        elif self.scores is not None:
            odds = torch.as_tensor(self.scores(samples, prompts, columns), dtype=torch.float64)
            chances = (torch.sigmoid(odds[i] - odds[j]).item() for i, j in shown)
            outcomes = [None if math.isnan(chance) else chance for chance in chances]
        else:
            outcomes = self._compare(samples, prompts[0], shown)
        self.rounds += len(shown)
        self.undecided += outcomes.count(None)
        wins = torch.zeros(size, dtype=torch.float64)
        for (i, j), outcome in zip(shown, outcomes, strict=True):
            won = 0.5 if outcome is None else outcome
            wins[i] += won
            wins[j] += 1 - won
        return (wins / (len(shown) / len(pairs)) / (size - 1)).tolist()

    def _ask(self, samples: torch.Tensor, prompt: str, row: Mapping[str, Any], pairs: Pairs) -> list[float | None]:
        assert self.chat is not None
        parts = [pictures(sample, self.frames) for sample in samples]
        question = text(fill_in(self.template, {**row, "prompt": prompt}))
        return self.chat.ask([[text("First:"), *parts[i], text("Second:"), *parts[j], question] for i, j in pairs])

    def _compare(self, samples: torch.Tensor, prompt: str, pairs: Pairs) -> list[float | None]:
        assert self.compare is not None
        with preserve("the function that compares", self.compare, calls=True):
            outcomes = [self.compare(samples[i], samples[j], prompt) for i, j in pairs]
        for outcome in outcomes:
            if outcome is not None and not (isinstance(outcome, (int, float)) and 0 <= outcome <= 1):
                raise RewardError(f"compare returned {outcome!r}, not a number from 0 to 1 or None")
        return outcomes
