"""Base class of rewards that ask a vision-language model of transformers, in this process."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForImageTextToText, AutoProcessor, BatchFeature

from rewards.base import RewardError
from rewards.models.model import ModelReward
from rewards.questions import Question


class VisionLanguageReward(ModelReward):
    """Any model of AutoModelForImageTextToText with a chat template: Qwen2.5-VL, Qwen3-VL, Gemma 3, ...

    Pictures keep their size as far as the model's own processor allows. A batch is padded on the left, so that the last
    token of each row is that of its question.
    """

    def __init__(self, path: str | None = None, *, batch_size: int = 8, dtype: str = "bfloat16") -> None:
        super().__init__(path, batch_size=batch_size, dtype=dtype)

    @cached_property
    def processor(self) -> Any:
        """The processor of transformers at `path`, with its chat template."""
        with self.loading(self.path):
            processor = AutoProcessor.from_pretrained(self.path)
            if getattr(processor, "chat_template", None) is None:
                raise RewardError(f"{self.called}: {self.path} has no chat template, take a model that is instructed")
            processor.tokenizer.padding_side = "left"
            return processor

    def _load(self) -> nn.Module:
        _ = self.processor  # a folder that lacks it is refused before weights are read
        return self.load_pretrained(AutoModelForImageTextToText)

    def next_logits(self, questions: Sequence[Question]) -> torch.Tensor:
        """Return the logits (b, V), float32, of the first token of the answers."""
        return self.model(**self._inputs(questions), use_cache=False, logits_to_keep=1).logits[:, -1].float()

    def answer(self, questions: Sequence[Question], max_tokens: int) -> list[str]:
        """Return the most likely answers, token by token, of at most `max_tokens` tokens."""
        inputs = self._inputs(questions)
        unsampled = dict.fromkeys(("temperature", "top_p", "top_k"))  # that a model's folder may set
        written = self.model.generate(**inputs, max_new_tokens=max_tokens, do_sample=False, **unsampled)
        tokens = written[:, inputs["input_ids"].shape[1] :]
        return self.processor.batch_decode(tokens, skip_special_tokens=True)

    def _inputs(self, questions: Sequence[Question]) -> BatchFeature:
        template = str(self.processor.chat_template)
        options = {"enable_thinking": False} if "enable_thinking" in template else {}
        prompts = [
            self.processor.apply_chat_template(
                [{"role": "user", "content": question}], add_generation_prompt=True, **options
            )
            for question in questions
        ]
        images = [[part["image"] for part in question if part["type"] == "image"] for question in questions]
        begun = self.processor.tokenizer.bos_token  # many templates write it; it must not stand there twice
        special = {"add_special_tokens": False} if begun and prompts[0].startswith(begun) else {}
        inputs = self.processor(text=prompts, images=images, padding=True, return_tensors="pt", **special)
        return inputs.to(self.device, self.dtype)  # of what is no whole number
