"""VQAScore: the probability that a vision-language model finds the prompt in a picture."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch

from rewards.image import check_images
from rewards.models.vision_language.base import VisionLanguageReward
from rewards.questions import Question, pictures, text


class VqaScore(VisionLanguageReward):
    """VQAScore: the probability that a vision-language model says "Yes" to whether a picture shows its prompt, 0 to 1.

    'Does this figure show "{prompt}"? Please answer Yes or No.' (Lin et al., 2404.01291). The paper's own model is
    CLIP-FlanT5; here it is any instructed model of transformers, asked as the authors' code t2v_metrics asks Qwen2.5-VL and
    Qwen3-VL: the softmax over all tokens of the first token of the answer. Departures:

    1. From the paper: another model, "Yes or No" for "yes or no", and the probability of "Yes" alone. That of CLIP-FlanT5
       is the geometric mean of the probabilities of "Yes" and of the end after it.
    2. From t2v_metrics: a repetition penalty in the model's generation settings (Qwen2.5-VL: 1.05) is not applied, though
       transformers applies it to the numbers that t2v_metrics reads.
    3. From t2v_metrics: pictures are resized by the model's processor instead of qwen-vl-utils. Both round to whole patches
       and use a bicubic filter; bounds of the number of pixels may differ.

        rewards: [{use: vqa_score, options: {path: Qwen/Qwen2.5-VL-7B-Instruct, batch_size: 8, dtype: bfloat16}}]

    Args:
        path: a folder or a hub id of an instructed vision-language model with its processor.
        batch_size, dtype: of the model; dtype is bfloat16, float32 or float16.
    """

    called = "vqa_score"
    weights = "Qwen/Qwen2.5-VL-7B-Instruct"

    def __call__(self, images: torch.Tensor, prompts: Sequence[str]) -> list[float]:
        """Return one score per picture, float (B, 3, H, W) in [0, 1]."""
        check_images(self.called, images)
        return self.score_batches(
            [
                [*pictures(image, 1), text(f'Does this figure show "{prompt}"? Please answer Yes or No.')]
                for image, prompt in zip(images, prompts, strict=True)
            ]
        ).tolist()

    @cached_property
    def _yes(self) -> int:
        """The first token of "Yes"."""
        return self.processor.tokenizer.encode("Yes", add_special_tokens=False)[0]

    def _score(self, questions: Sequence[Question]) -> torch.Tensor:
        return self.next_logits(questions).softmax(-1)[:, self._yes]
