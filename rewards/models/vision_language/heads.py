"""Rewards by a vision-language model with a reward head: what it is asked, where the head reads, how weights are named."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
import transformers
from torch import nn

from rewards.base import RewardError
from rewards.models.model import ModelReward, select_weights

# Names in checkpoints of transformers up to 4.51 and since, with or without PEFT -> those of the class without a head.
NAMES = {
    r"^base_model\.model\.": "",
    r"^(model\.)?visual\.": "visual.",
    r"^model\.(language_model\.)?": "language_model.",
}
BACKBONE = ("visual.", "language_model.")
EMBEDDING = "language_model.embed_tokens.weight"
FROZEN, DOWN, UP = ".base_layer.", ".lora_A.default.weight", ".lora_B.default.weight"  # PEFT's names of one layer


class HeadReward(ModelReward):
    """A reward whose head reads the last hidden states of a vision-language model at tokens added for that purpose.

    A subclass sets the class of transformers (`backbone`), the hub id of the model that was fine-tuned (`base`), the
    `question`, in which {prompt} is replaced, and the added `tokens` in the question's order.

    Positions of tokens are 0, 1, 2, ... if `sequential`, else those of the model (M-RoPE). The released code of HPSv3 and
    VideoAlign hands its Qwen2-VL embeddings without ids, and transformers 4.45.2, which both pin, then numbers positions
    in sequence, those of a picture's tokens too. The weights were trained with that.
    """

    backbone: Any
    base: str
    question: str
    tokens: tuple[str, ...]
    sequential: bool

    def __init__(
        self, path: str | None = None, base: str | None = None, *, dtype: str = "bfloat16", **options: Any
    ) -> None:
        super().__init__(path, dtype=dtype, **options)
        self.base = str(base or self.base)

    @cached_property
    def processor(self) -> Any:
        """Processor of `base`: its tokenizer with the added tokens, its chat template, its image and video processors."""
        with self.loading(self.base):
            processor = transformers.AutoProcessor.from_pretrained(self.base)
        processor.tokenizer.padding_side = "right"
        processor.tokenizer.add_tokens(list(self.tokens), special_tokens=True)
        return processor

    def _load(self) -> nn.Module:
        with self.loading(self.base):
            config = self.read_config(self.backbone, self.base)
        words = len(self.processor.tokenizer)
        weights = self._weights()
        if EMBEDDING not in weights:
            raise RewardError(f"{self.called}: {self.path} lacks the weights of {EMBEDDING}")
        rows = config.text_config.vocab_size = len(weights[EMBEDDING])
        if rows != words:
            place = f"{self.called}: {self.path}"
            raise RewardError(f"{place} embeds {rows} tokens, but {self.base} has {words} with those of the head")
        inner = {name: value for name, value in weights.items() if name.startswith(BACKBONE)}
        backbone = self.load_pretrained(self.backbone, config=config, state_dict=inner)
        return nn.ModuleDict({"backbone": backbone, **self._heads(weights)})

    def states(
        self, prompts: Sequence[str], kind: str, samples: Sequence[torch.Tensor], **options: Any
    ) -> torch.Tensor:
        """Return the last hidden states at the added tokens, (b, tokens, D) float32.

        `samples` are b pictures (3, H, W) if `kind` is "image", or videos (F, 3, H, W) if it is "video", in 8 bits;
        `options` go to their processor.
        """
        talks = [self._ask(prompt, kind) for prompt in prompts]
        text = self.processor.apply_chat_template(talks, tokenize=False, add_generation_prompt=True)
        given = {f"{kind}s": list(samples), f"{kind}s_kwargs": options}
        batch = self.processor(text=text, padding=True, return_tensors="pt", **given).to(self.device)
        ids = batch["input_ids"]
        if self.sequential:
            batch["position_ids"] = torch.arange(ids.shape[1], device=ids.device).expand(3, *ids.shape)
        hidden = self.model["backbone"](**batch).last_hidden_state
        added = torch.tensor(self.processor.tokenizer.convert_tokens_to_ids(list(self.tokens)), device=ids.device)
        return hidden[torch.isin(ids, added)].view(len(ids), len(self.tokens), -1).float()

    def _ask(self, prompt: str, kind: str) -> list[dict[str, Any]]:
        if any(token in prompt for token in self.tokens):
            raise RewardError(f"{self.called}: the prompt {prompt!r} contains {' or '.join(self.tokens)}")
        text = {"type": "text", "text": self.question.format(prompt=prompt)}
        return [{"role": "user", "content": [{"type": kind}, text]}]

    @abstractmethod
    def _weights(self) -> dict[str, torch.Tensor]:
        """Return the checkpoint under the names that `rename` gives."""

    @abstractmethod
    def _heads(self, weights: Mapping[str, torch.Tensor]) -> dict[str, nn.Module]:
        """Return the modules that read hidden states, float32."""


def rename(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return weights under the names of the class without a head; names of heads stay."""
    return {_rename(name): value for name, value in weights.items()}


def _rename(name: str) -> str:
    for pattern, replacement in NAMES.items():
        name = re.sub(pattern, replacement, name)
    return name


def merge_lora(weights: Mapping[str, torch.Tensor], scale: float, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return weights with PEFT's adapters merged: W + scale B A, computed in float32 and rounded to `dtype`."""
    merged = {}
    for name, value in weights.items():
        layer, _, kind = name.rpartition(FROZEN)
        if layer and kind == "weight":
            change = weights[layer + UP].float() @ weights[layer + DOWN].float()
            merged[f"{layer}.weight"] = (value.float() + scale * change).to(dtype)
        elif layer:
            merged[f"{layer}.{kind}"] = value
        elif not name.endswith((UP, DOWN)):
            merged[name] = value
    return merged


def layers(weights: Mapping[str, torch.Tensor], prefix: str, activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """Return the linear layers whose names begin with `prefix` and a number, with an activation between them."""
    part = select_weights(weights, prefix)
    found = [linear(part, f"{number}.") for number in sorted({int(name.split(".")[0]) for name in part})]
    return nn.Sequential(*[module for layer in found for module in (layer, activation())][:-1])


def linear(weights: Mapping[str, torch.Tensor], prefix: str) -> nn.Linear:
    """Return the linear layer whose weights are named `prefix` and weight or bias, float32; it may have no bias."""
    part = {name: value.float() for name, value in select_weights(weights, prefix).items()}
    outputs, inputs = part["weight"].shape
    layer = nn.Linear(inputs, outputs, bias="bias" in part)
    layer.load_state_dict(part)
    return layer
