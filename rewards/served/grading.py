"""Questions to vision-language models about pictures and videos, and how their answers are read.

Each style asks an instruction-tuned model, in our own words, for the quality that a well-known reward model measures.
`template` takes the exact wording that a fine-tuned judge, such as UnifiedReward, was trained on. A question is a list of
parts, as the chat templates of transformers take them; `rewards.served` encodes its pictures for a server.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

import torch
from PIL import Image

from rewards.base import RewardError, nearest
from rewards.compute import batched
from rewards.files.frames import choose
from rewards.texts.text import last_tagged

Part = dict[str, Any]
Question = list[Part]

LEAST_MASS = 0.5  # minimum probability of all answers together
TOP = 20  # tokens with probabilities, OpenAI's maximum
_LABELLED = re.compile(r"\W*(?:final )?(?:score|answer)\W*?:(.*)", re.IGNORECASE)

FIVE = {str(n): float(n) for n in range(1, 6)}
WORDS = {"excellent": 5.0, "good": 4.0, "fair": 3.0, "poor": 2.0, "bad": 1.0}


@dataclass(frozen=True)
class Style:
    """Questions about a sample, each answered by one of `answers`, and how answers are read: `logprobs`, `text`, ..."""

    questions: tuple[str, ...]
    answers: Mapping[str, float]
    method: str = "logprobs"

    def ask(
        self, samples: torch.Tensor, prompts: Sequence[str], columns: Mapping[str, Sequence[Any]], frames: int
    ) -> list[Question]:
        """Return all questions about samples, images (B, 3, H, W) or videos (B, F, 3, H, W) in [0, 1], sample by sample.

        A video is shown as at most `frames` frames.
        """
        low, high = (f"{end(self.answers.values()):g}" for end in (min, max))
        asked: list[Question] = []
        for i, (sample, prompt) in enumerate(zip(samples, prompts, strict=True)):
            shown = pictures(sample, frames)
            fields = {
                **{name: values[i] for name, values in columns.items()},
                "prompt": prompt,
                "low": low,
                "high": high,
            }
            asked += [[*shown, text(fill_in(question, fields))] for question in self.questions]
        return asked

    def grade(self, values: Sequence[float | None]) -> list[float | None]:
        """Return the grades of samples, 0 (the lowest answer) to 1, from the values of the answers to `ask`.

        A grade is the mean over a sample's questions; None if an answer is None.
        """
        low, high = (end(self.answers.values()) for end in (min, max))
        return [
            None
            if None in of_sample
            else (mean(value for value in of_sample if value is not None) - low) / (high - low)
            for of_sample in batched(values, len(self.questions))
        ]


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


def choose_style(
    name: str,
    template: str | Sequence[str] | None = None,
    scale: Sequence[int] | Mapping[str, float] | None = None,
    method: str | None = None,
) -> Style:
    """Return a style of `STYLES` with other questions, answers or another method, if given; raise RewardError.

    Args:
        template: a question, or several; {prompt}, {low}, {high} and column names in braces are replaced.
        scale: lowest and highest grade, whole numbers; or a map of words and their values.
    """
    if name not in STYLES:
        raise RewardError(f"style: there is no {name!r}, {nearest(name, STYLES)}")
    style = STYLES[name]
    return Style(
        (template,) if isinstance(template, str) else tuple(template or style.questions),
        style.answers if scale is None else _answers_of(scale),
        method or style.method,
    )


def check_beginnings(answers: Mapping[str, float], instead: str) -> None:
    """Raise RewardError if an answer begins another, so that its first token does not tell them apart."""
    clash = next(((a, b) for a in answers for b in answers if a != b and b.startswith(a)), None)
    if clash:
        raise RewardError(
            f"method: logprobs tells answers by their beginning, and {clash[0]!r} begins {clash[1]!r}; take {instead}"
        )


def text(words: str) -> Part:
    """Return words as a part of a question."""
    return {"type": "text", "text": words}


def pictures(sample: torch.Tensor, frames: int) -> list[Part]:
    """Return an image (3, H, W) in [0, 1] or evenly spaced frames of a video (F, 3, H, W) as parts of a question."""
    if sample.ndim not in (3, 4) or sample.shape[-3] != 3:
        raise ValueError(
            f"a judge looks at images (3, H, W) and videos (F, 3, H, W), not at shape {tuple(sample.shape)}"
        )
    if sample.ndim == 4:
        return [part for place in choose(frames, len(sample)) for part in pictures(sample[place], frames)]
    pixels = sample.detach().float().cpu().mul(255).round().clamp(0, 255).byte().permute(1, 2, 0).numpy()
    return [{"type": "image", "image": Image.fromarray(pixels)}]


def fill_in(template: str, fields: Mapping[str, Any]) -> str:
    """Return a question with its fields replaced; raise RewardError if one is missing or braces do not match."""
    try:
        return template.format_map(fields)
    except KeyError as missing:
        raise RewardError(f"template: there is no {missing} to fill in, there are {', '.join(fields)}") from None
    except (ValueError, IndexError, AttributeError) as error:
        raise RewardError(f"template: {error}; braces that name no field are written twice") from None


def closing_for(method: str, answers: Mapping[str, float]) -> str:
    """Return the text that asks for the form of an answer."""
    choices = f"one of these: {', '.join(answers)}"
    if method == "guided":
        return f'Answer with JSON, {{"answer": X}}, where X is {choices}.'
    if method == "text":
        ends = [f"{end(answers.values()):g}" for end in (min, max)]
        return f"End with a line 'Final Score: X', where X is {' to '.join(ends) if is_numeric(answers) else choices}."
    return f"Answer with {choices}, and nothing else."


def read_answer(words: str, answers: Mapping[str, float]) -> float | None:
    """Return the value of an answer in words; None if it is none of `answers`.

    An answer stands alone, as {"answer": ...}, in a last <answer>...</answer>, or in the last line as `Final Score: ...`,
    `Score: ...` or `Answer: ...`, in any case. If all answers are numbers, a number between them counts as itself.
    """
    words = words.strip()
    tagged = last_tagged(words, any_case=True)
    labelled = _LABELLED.fullmatch(words.rpartition("\n")[2])
    answer = tagged if tagged is not None else labelled[1] if labelled else words
    try:
        parsed = json.loads(words)
        answer = str(parsed["answer"]) if isinstance(parsed, dict) and list(parsed) == ["answer"] else answer
    except (ValueError, RecursionError):
        pass
    answer = answer.strip(" \t\n\"'`*.[]").casefold()
    values = {key.casefold(): value for key, value in answers.items()}
    if answer in values:
        return values[answer]
    if re.fullmatch(r"-?\d+(\.\d+)?", answer) and is_numeric(answers):
        return float(answer) if min(values.values()) <= float(answer) <= max(values.values()) else None
    return None


def expected_value(top: Sequence[tuple[str, float]], answers: Mapping[str, float]) -> float | None:
    """Return the mean of the answers' values, weighted by probability; None if probabilities sum to less than `LEAST_MASS`.

    `top` has the most probable tokens and their log-probabilities; a token counts for the only answer that begins with it.
    """
    mass = total = 0.0
    for token, log_prob in top:
        word = token.strip().casefold()
        meant = [value for answer, value in answers.items() if word and answer.casefold().startswith(word)]
        if len(meant) == 1:
            mass += math.exp(log_prob)
            total += math.exp(log_prob) * meant[0]
    return total / mass if mass >= LEAST_MASS else None


def is_numeric(answers: Mapping[str, float]) -> bool:
    """Return whether each answer is its value in digits."""
    return all(answer == f"{value:g}" for answer, value in answers.items())


def _answers_of(scale: Sequence[int] | Mapping[str, float]) -> dict[str, float]:
    if isinstance(scale, Mapping):
        answers = {str(word): float(value) for word, value in scale.items()}
    else:
        low, high = scale
        answers = {str(n): float(n) for n in range(low, high + 1)}
    if len(set(answers.values())) < 2:
        raise RewardError(f"scale: {scale} has no two different values, write for example [1, 5]")
    return answers
