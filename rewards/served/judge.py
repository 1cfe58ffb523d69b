"""Rewards by a judge: a vision-language model behind an OpenAI-compatible endpoint that grades each sample.

Each style asks an instruction-tuned model, in our own words, for the quality that a well-known reward model measures. HPSv3
and VideoAlign themselves have heads of their own, which no chat endpoint serves; they are in `rewards.models`. `template`
takes the exact wording that a fine-tuned judge, such as UnifiedReward, was trained on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

import torch

from rewards.base import RewardError, batched, nearest
from rewards.served.chat import Chat, pictures, text

FIVE = {str(n): float(n) for n in range(1, 6)}
WORDS = {"excellent": 5.0, "good": 4.0, "fair": 3.0, "poor": 2.0, "bad": 1.0}


@dataclass(frozen=True)
class Style:
    """Questions to a judge, each answered by one of `answers`; a sample's grade is their mean."""

    questions: tuple[str, ...]
    answers: Mapping[str, float]
    method: str = "logprobs"


STYLES = {
    "qwen_vl": Style(
        (
            "This was generated from the description between the lines.\n---\n{prompt}\n---\n"
            "Grade it from {low} (worst) to {high} (best). Ask first whether everything described is there, in the right "
            "number, colour and place; then whether it is clean and well made.",
        ),
        FIVE,
    ),
    "unified_reward": Style(
        (
            "Text Caption: [{prompt}]\n"
            "The image above was generated for this caption. Weigh how closely it follows the caption and how good it "
            "looks, and give one score from {low} to {high}, decimals allowed.",
        ),
        FIVE,
        "text",
    ),
    "hpsv3_style": Style(
        (
            "Many people see this picture among others that were made for the same request:\n---\n{prompt}\n---\n"
            "How often will they choose it as their favourite, for what it shows and for its beauty? "
            "{low} is hardly ever, {high} nearly always.",
        ),
        FIVE,
    ),
    "deqa_style": Style(
        (
            "Never mind what the picture shows. How good is its technical quality: sharpness, noise, exposure, colours, "
            "compression, artefacts?",
        ),
        WORDS,
    ),
    "video_align_style": Style(
        (
            "These are frames of one generated video, in order. Grade the single frames as pictures, sharpness, detail and "
            "artefacts, from {low} (worst) to {high} (best).",
            "These are frames of one generated video, in order. Grade its motion from {low} (frozen, jerky or against "
            "physics) to {high} (lively, smooth and plausible).",
            "These are frames of one generated video, in order. It should show:\n---\n{prompt}\n---\n"
            "Grade how far it does, things, actions and camera, from {low} (not at all) to {high} (in everything).",
        ),
        FIVE,
    ),
}


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
        if style not in STYLES:
            raise RewardError(f"style: there is no {style!r}, {nearest(style, STYLES)}")
        chosen = STYLES[style]
        self.questions = (template,) if isinstance(template, str) else tuple(template or chosen.questions)
        answers = chosen.answers if scale is None else _answers(scale)
        self.chat = Chat(answers, endpoint, model=model, method=method or chosen.method, **options)
        self.low, self.high = min(answers.values()), max(answers.values())
        self.frames = frames

    def __call__(self, samples: torch.Tensor, prompts: Sequence[str], **columns: Sequence[Any]) -> list[float | None]:
        """Return grades of B samples, images (B, 3, H, W) or videos (B, F, 3, H, W) in [0, 1]."""
        asked = []
        for i, (sample, prompt) in enumerate(zip(samples, prompts, strict=True)):
            shown = pictures(sample, self.frames)
            row = {name: values[i] for name, values in columns.items()}
            fields = {**row, "prompt": prompt, "low": f"{self.low:g}", "high": f"{self.high:g}"}
            asked += [[*shown, text(fill_in(question, fields))] for question in self.questions]
        return [self._grade(values) for values in batched(self.chat.ask(asked), len(self.questions))]

    def _grade(self, values: Sequence[float | None]) -> float | None:
        grades = [value for value in values if value is not None]
        return (mean(grades) - self.low) / (self.high - self.low) if len(grades) == len(values) else None


def fill_in(template: str, fields: Mapping[str, Any]) -> str:
    """Return a question with its fields replaced; raise RewardError if one is missing or braces do not match."""
    try:
        return template.format_map(fields)
    except KeyError as missing:
        raise RewardError(f"template: there is no {missing} to fill in, there are {', '.join(fields)}") from None
    except (ValueError, IndexError, AttributeError) as error:
        raise RewardError(f"template: {error}; braces that name no field are written twice") from None


def _answers(scale: Sequence[int] | Mapping[str, float]) -> dict[str, float]:
    if isinstance(scale, Mapping):
        answers = {str(word): float(value) for word, value in scale.items()}
    else:
        low, high = scale
        answers = {str(n): float(n) for n in range(low, high + 1)}
    if len(set(answers.values())) < 2:
        raise RewardError(f"scale: {scale} has no two different values, write for example [1, 5]")
    return answers
