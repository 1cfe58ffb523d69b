"""Rewards by a judge: a vision-language model behind an OpenAI-compatible endpoint that grades each sample.

HPSv3 and VideoAlign themselves have heads of their own, which no chat endpoint serves; they are in
`rewards.models.vision_language`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rewards.served.chat import Chat
from rewards.served.grading import choose_style


class Judge:
    """A vision-language model's grade of each image or video, mapped to 0 (the lowest answer) to 1 (the highest).

    None where an answer cannot be read. Videos are shown as single frames.

    Args:
        endpoint: URL of an OpenAI-compatible endpoint, mostly ending in /v1; several, separated by commas, are replicas.
        model: its name there; optional if there is only one.
        style: a built-in question: qwen_vl, unified_reward, hpsv3_style, deqa_style or video_align_style.
        template: your own question, or several, whose grades are averaged; {prompt}, {low}, {high} and column names in
            braces are replaced.
        scale: lowest and highest grade, whole numbers; or a map of words and their values.
        method: logprobs, guided, guided_choice, guided_regex or text; see `rewards.served.chat.Chat`.
        frames: maximum number of frames of a video.
        options: others of `rewards.served.chat.Chat`: concurrency, timeout, retries, tries, token_env, system, closing,
            max_tokens, extra.
    """

    remote = True  # waits for a server and retries by itself

    def __init__(
        self,
        endpoint: str,
        model: str | None = None,
        *,
        style: str = "qwen_vl",
        template: str | Sequence[str] | None = None,
        scale: Sequence[int] | Mapping[str, float] | None = None,
        method: str | None = None,
        frames: int = 8,
        **options: Any,
    ):
        self.style = choose_style(style, template, scale, method)
        self.chat = Chat(self.style.answers, endpoint, model=model, method=self.style.method, **options)
        self.frames = frames

    def __call__(self, samples: torch.Tensor, prompts: Sequence[str], **columns: Sequence[Any]) -> list[float | None]:
        """Return grades of B samples, images (B, 3, H, W) or videos (B, F, 3, H, W) in [0, 1]."""
        return self.style.grade(self.chat.ask(self.style.ask(samples, prompts, columns, self.frames)))
