"""Judges in this process: a vision-language model of transformers that grades each sample."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rewards.base import RewardError, nearest
from rewards.models.vision_language.asked import AskedReward
from rewards.served.grading import (
    TOP,
    Question,
    check_beginnings,
    choose_style,
    closing_for,
    expected_value,
    read_answer,
    text,
)

METHODS = ("logprobs", "text")


class LocalJudge(AskedReward):
    """A vision-language model's grade of each image or video, mapped to 0 (the lowest answer) to 1 (the highest).

    As `judge`, without a server: the same questions, read in the same way. None where an answer cannot be read. Videos are
    shown as single frames. Prefer a server for models that do not fit beside the policy, and for many tokens of reasoning.

        rewards: [{use: judge_local, options: {path: Qwen/Qwen3-VL-8B-Instruct, style: deqa_style, dtype: bfloat16}}]

    Args:
        path: a folder or a hub id of an instructed vision-language model with its processor.
        style: a built-in question: qwen_vl (the default), unified_reward, hpsv3_style, deqa_style or video_align_style.
        template: your own question, or several, whose grades are averaged; {prompt}, {low}, {high} and column names in
            braces are replaced.
        scale: lowest and highest grade, whole numbers; or a map of words and their values.
        method: logprobs, the mean of the grades, weighted with the probabilities of their first tokens; or text, which the
            model may use to reason before its last line.
        frames: maximum number of frames of a video.
        max_tokens: of an answer by the method text.
        batch_size, dtype: of the model; dtype is bfloat16, float32 or float16.
    """

    called = "judge_local"
    weights = "Qwen/Qwen3-VL-8B-Instruct"
    default_style = "qwen_vl"

    def __init__(
        self,
        path: str | None = None,
        *,
        style: str | None = None,
        template: str | Sequence[str] | None = None,
        scale: Sequence[int] | Mapping[str, float] | None = None,
        method: str | None = None,
        frames: int = 8,
        max_tokens: int = 1024,
        **options: Any,
    ) -> None:
        super().__init__(path, **options)
        self.style = choose_style(style or self.default_style, template, scale, method)
        if self.style.method not in METHODS:
            raise RewardError(f"method: there is no {self.style.method!r}, {nearest(self.style.method, METHODS)}")
        if self.style.method == "logprobs":
            check_beginnings(self.style.answers, instead="text")
        self.frames, self.max_tokens = frames, max_tokens

    def __call__(self, samples: torch.Tensor, prompts: Sequence[str], **columns: Sequence[Any]) -> list[float | None]:
        """Return grades of B samples, images (B, 3, H, W) or videos (B, F, 3, H, W) in [0, 1]."""
        closing = text(closing_for(self.style.method, self.style.answers))
        asked = [[*question, closing] for question in self.style.ask(samples, prompts, columns, self.frames)]
        values = self.score_batches(asked).tolist()
        return self.style.grade([None if math.isnan(value) else value for value in values])

    def _score(self, questions: Sequence[Question]) -> torch.Tensor:
        answers = self.style.answers
        if self.style.method == "text":
            values = [read_answer(words, answers) for words in self.answer(questions, self.max_tokens)]
        else:
            top = self.next_logits(questions).log_softmax(-1).topk(TOP)
            tokens = [self.processor.batch_decode(row[:, None]) for row in top.indices]
            values = [
                expected_value([*zip(words, log_probs, strict=True)], answers)
                for words, log_probs in zip(tokens, top.values.tolist(), strict=True)
            ]
        return torch.tensor([math.nan if value is None else value for value in values])


class UnifiedRewardLocal(LocalJudge):
    """UnifiedReward 2.0 in this process: how closely a picture follows its prompt and how good it looks, 0 to 1.

    The score of 1 to 5 after `Final Score:` (Wang et al., 2503.05236), mapped to 0 to 1; None if there is none. The question
    is that of the served `unified_reward`, in our words; give the authors' wording as `template`. Tokens are the most
    likely ones, as the authors' settings (temperature 1e-6) make them, too.

        rewards: [{use: unified_reward_local, options: {path: CodeGoat24/UnifiedReward-2.0-qwen-7b, batch_size: 8}}]

    Args:
        path: a folder or a hub id of a UnifiedReward on a Qwen2.5-VL, Qwen3-VL or Qwen3.5.
        options: those of `judge_local`.
    """

    called = "unified_reward_local"
    weights = "CodeGoat24/UnifiedReward-2.0-qwen-7b"
    default_style = "unified_reward"
