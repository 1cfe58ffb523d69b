"""Rewards on a CLIP of open_clip."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import open_clip
import torch
from torch import nn

from rewards.base import RewardError
from rewards.models.model import (
    PairedReward,
    PictureReward,
    aesthetic_head,
    encode_unique,
    load_weights,
    select_weights,
)
from rewards.models.preprocessing import Preprocessing, of_open_clip

HPS_FILES = {"v2.0": "HPS_v2_compressed.pt", "v2.1": "HPS_v2.1_compressed.pt"}
PRECISIONS = {torch.float32: "fp32", torch.bfloat16: "pure_bf16", torch.float16: "pure_fp16"}


class HPSv2(PairedReward):
    """HPSv2: cos(image, prompt) of a CLIP ViT-H/14 trained on people's choices (Wu et al., 2306.09341), mostly 0.2 to 0.4.

    As in the authors' code the cosine is neither scaled nor clipped, and a picture that is not square gets black bars
    (other CLIPs crop it). Tables with values of 20 to 40 multiply by 100.

        rewards: [{use: hpsv2, options: {version: v2.1, batch_size: 16, dtype: bfloat16}}]

    Args:
        path: a file, or a folder or hub id with the version's file.
        version: v2.1 or v2.0.
        architecture: open_clip's name of the CLIP.
        batch_size, dtype: of the model; dtype is float32, bfloat16 or float16.
    """

    called = "hpsv2"
    weights = "xswu/HPSv2"

    def __init__(
        self, path: str | None = None, *, version: str = "v2.1", architecture: str = "ViT-H-14", **options: Any
    ) -> None:
        super().__init__(path, **options)
        if version not in HPS_FILES:
            raise RewardError(f"hpsv2: there is no version {version!r}, choose one of {', '.join(HPS_FILES)}")
        self.version, self.architecture = version, architecture

    @cached_property
    def tokenizer(self) -> Callable[[list[str]], torch.Tensor]:
        """Tokenizer of open_clip: ids (b, 77)."""
        return open_clip.get_tokenizer(self.architecture)

    @cached_property
    def preprocessing(self) -> Preprocessing:
        """The CLIP's preprocessing, but padding in place of cropping."""
        return replace(of_open_clip(self.model.visual.preprocess_cfg), fit="contain")

    def _load(self) -> nn.Module:
        weights = str(self.file(HPS_FILES[self.version]))
        return open_clip.create_model(self.architecture, pretrained=weights, precision=PRECISIONS[self.dtype])

    def _score(self, images: torch.Tensor, prompts: Sequence[str]) -> torch.Tensor:
        return self.cosine(images, prompts)

    def _embed(self, images: torch.Tensor, prompts: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor]:
        def encode(texts: list[str]) -> torch.Tensor:
            return self.model.encode_text(self.tokenizer(texts).to(self.device))

        return self.model.encode_image(self.pixels(images)), encode_unique(encode, prompts)


class Aesthetic(PictureReward):
    """The LAION aesthetic predictor 2 (sac+logos+ava1-l14-linearMSE): people's mean rating, about 1 to 10, mostly 4 to 7.

    head(f / |f|) of the picture's CLIP ViT-L/14 features f; the prompt does not count. DDPO (2305.13301) and Flow-GRPO
    train on it. It favours painterly, glowing, centred pictures and is easily hacked.

        rewards: [{use: aesthetic, options: {batch_size: 16}}]

    Args:
        path: weights of the head: a file, or a folder or hub id with aesthetic-model.pth (the same file renamed).
        architecture: open_clip's name of the CLIP.
        clip: weights of the CLIP: a tag of open_clip, which downloads them, or a file.
        batch_size, dtype: of the CLIP; dtype is float32, bfloat16 or float16. The head is float32.
    """

    called = "aesthetic"
    weights = "trl-lib/ddpo-aesthetic-predictor"

    def __init__(
        self, path: str | None = None, *, architecture: str = "ViT-L-14-quickgelu", clip: str = "openai", **options: Any
    ) -> None:
        super().__init__(path, **options)
        self.architecture, self.clip = architecture, str(clip)

    @cached_property
    def preprocessing(self) -> Preprocessing:
        """The CLIP's preprocessing."""
        return of_open_clip(self.model["visual"].preprocess_cfg)

    def _load(self) -> nn.Module:
        head = aesthetic_head(select_weights(load_weights(self.file("aesthetic-model.pth")), "layers."))
        with self.loading(self.clip):
            precision = PRECISIONS[self.dtype]
            visual = open_clip.create_model(self.architecture, pretrained=self.clip, precision=precision).visual
        if head[0].in_features != visual.output_dim:
            raise RewardError(
                f"aesthetic: the head at {self.path} reads {head[0].in_features} features, "
                f"but {self.architecture} gives {visual.output_dim}"
            )
        return nn.ModuleDict({"visual": visual, "head": head})

    def _score(self, images: torch.Tensor, prompts: Sequence[str]) -> torch.Tensor:
        features = self.model["visual"](self.pixels(images)).float()
        return self.model["head"](nn.functional.normalize(features, dim=-1)).squeeze(-1)
