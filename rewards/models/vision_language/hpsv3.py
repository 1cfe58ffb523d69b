"""HPSv3 and HPSv3++: people's preference among pictures, by a vision-language model with a reward head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as F
from transformers import Qwen2VLModel, Qwen3VLModel
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

from rewards.base import RewardError
from rewards.image import check_images
from rewards.models.model import load_weights
from rewards.models.preprocessing import to_bytes
from rewards.models.vision_language import wordings
from rewards.models.vision_language.heads import HeadReward, layers, linear, rename

PIXELS = 256 * 28 * 28  # of a resized picture, about; its sides are multiples of 28


class HPSv3(HeadReward):
    """HPSv3: the mean of a preference that a Qwen2-VL 7B gives a picture and its prompt (Ma et al., 2508.03789).

    The head's first output, mu; the second, the deviation, is not used. It is unbounded: the authors' means of models go
    from -0.2 (Stable Diffusion 2) to 10.6 (Kolors). Pictures are resized to about 448 x 448 and keep their shape. Departure
    from the released code (the package hpsv3 1.0.0): (1) torchvision resizes, within 2 of 255 levels of PIL.

        rewards: [{use: hpsv3, options: {batch_size: 16, dtype: bfloat16}}]

    Args:
        path: a file, or a folder or hub id with HPSv3.safetensors.
        base: a folder or hub id of the Qwen2-VL for its config, tokenizer and processors; its weights are not read.
        batch_size, dtype: of the model; dtype is float32, bfloat16 or float16. The head is float32.
    """

    called = "hpsv3"
    weights = "MizzenAI/HPSv3"
    filename = "HPSv3.safetensors"
    base = "Qwen/Qwen2-VL-7B-Instruct"
    backbone = Qwen2VLModel
    question = wordings.HPSV3
    tokens = ("<|Reward|>",)
    sequential = True

    def __call__(self, images: torch.Tensor, prompts: Sequence[str]) -> list[float]:
        """Return one score per picture, float (B, 3, H, W) in [0, 1]."""
        check_images(self.called, images)
        return self.score_batches(images, list(prompts)).tolist()

    def _weights(self) -> dict[str, torch.Tensor]:
        weights: Any = load_weights(self.file(self.filename))
        return rename(weights.get("model", weights))  # the released code reads files of both kinds

    def _heads(self, weights: Mapping[str, torch.Tensor]) -> dict[str, nn.Module]:
        return {"head": layers(weights, "rm_head.")}

    def _score(self, images: torch.Tensor, prompts: Sequence[str]) -> torch.Tensor:
        size = smart_resize(*images.shape[-2:], factor=28, min_pixels=PIXELS, max_pixels=PIXELS)
        # On the CPU, where torchvision rounds between both directions, as PIL does.
        pictures = F.resize(to_bytes(images).cpu(), list(size), InterpolationMode.BICUBIC, antialias=True)
        return self._read(self.states(prompts, "image", list(pictures.to(self.device)))[:, 0])

    def _read(self, states: torch.Tensor) -> torch.Tensor:
        return self.model["head"](states)[:, 0]


class HPSv3Plus(HPSv3):
    """HPSv3++: HPSv3 on a Qwen3-VL 8B, conditioned on the generator's capability and the progress of training (2606.14657).

    With h the state at the token <|Reward|>: the capability is c = sigmoid(linear(h)), 0 to 1; (gamma, beta) are
    film(c, iteration); and mu = head((1 + gamma) h + beta). The authors score with `iteration` 0, and let it rise from 0.3
    to 1 over a training run. A picture is resized twice, as in their code: to sides that are multiples of 28, then of 32.

    Departures from the released code (PlantPotatoOnMoon/HPSv3-PlusPlus, 7bdbebc): (1) c comes from the picture alone, as in
    their training on pairs; their `reward` pools c over the pictures of a call, so that a score depends on the others, and
    agrees for a call of one. (2) `iteration` is constant in a run, since a reward is not told how far training is.
    (3) All after h is float32; theirs rounds c's layers to bfloat16. (4) That of hpsv3.

        rewards: [{use: hpsv3_plus, options: {iteration: 0.3, batch_size: 16, dtype: bfloat16}}]

    Args:
        path: a file, or a folder or hub id with hpsv3++.pth.
        base: a folder or hub id of the Qwen3-VL for its config, tokenizer and processors; its weights are not read.
        iteration: progress of the generator's training by reinforcement learning, 0 to 1.
        batch_size, dtype: of the model; dtype is float32, bfloat16 or float16. The head is float32.
    """

    called = "hpsv3_plus"
    weights = "Junjun2333/HPSv3-PlusPlus"
    filename = "hpsv3++.pth"
    base = "Qwen/Qwen3-VL-8B-Instruct"
    backbone = Qwen3VLModel
    question = wordings.HPSV3_PLUS
    sequential = False

    def __init__(self, path: str | None = None, *, iteration: float = 0.0, **options: Any) -> None:
        if not isinstance(iteration, (int, float)) or not 0 <= iteration <= 1:
            raise RewardError(f"{self.called}: iteration is {iteration!r}, but must be 0 to 1")
        super().__init__(path, **options)
        self.iteration = float(iteration)

    def _heads(self, weights: Mapping[str, torch.Tensor]) -> dict[str, nn.Module]:
        # The attention of the capability encoder pools several pictures; of one picture its weight is 1.
        capability = nn.Sequential(linear(weights, "cap_encoder.proj."), linear(weights, "cap_encoder.out_proj."))
        film = nn.Sequential(layers(weights, "cond_encoder.", nn.GELU), layers(weights, "film_gen."))
        return {**super()._heads(weights), "capability": capability, "film": film}

    def _read(self, states: torch.Tensor) -> torch.Tensor:
        capability = self.model["capability"](states).sigmoid()
        condition = torch.cat([capability, torch.full_like(capability, self.iteration)], dim=1)
        gamma, beta = self.model["film"](condition).chunk(2, dim=1)
        return super()._read((1 + gamma) * states + beta)
