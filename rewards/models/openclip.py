"""Rewards on a CLIP of open_clip."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import open_clip
import torch
from torch import nn
from typing_extensions import override

from rewards.base import RewardError
from rewards.models.model import PairedReward, PictureReward, encode_unique, laion_aesthetic_head, part_of, weights_of
from rewards.models.preprocessing import Preprocessing, of_open_clip

HPS_FILES = {"v2.0": "HPS_v2_compressed.pt", "v2.1": "HPS_v2.1_compressed.pt"}
PRECISIONS = {torch.float32: "fp32", torch.bfloat16: "pure_bf16", torch.float16: "pure_fp16"}


class HPSv2(PairedReward):
    """HPSv2: cos(image, prompt) of a CLIP ViT-H/14 trained on people's choices (Wu et al., 2306.09341), mostly 0.2 to 0.4.

    As in the authors' code the cosine is neither scaled nor cut off, and a picture that is not square is made to fit with
    black bars (other CLIPs cut its sides off). Tables that show 20 to 40 have it times 100.

        rewards: [{use: hpsv2, options: {version: v2.1, batch_size: 16, dtype: bfloat16}}]

    Args:
        path: of the weights: a file, or a folder or hub id that holds the version's file.
        version: v2.1 or v2.0.
        architecture: of the CLIP, by open_clip's name.
        batch_size: pictures at a time.
        dtype: float32, bfloat16 or float16.
    """

    called = "hpsv2"
    weights = "xswu/HPSv2"

    def __init__(
        self,
        path: str | None = None,
        *,
        version: str = "v2.1",
        architecture: str = "ViT-H-14",
        **options: Any,
    ) -> None:
        super().__init__(path, **options)
        if version not in HPS_FILES:
            raise RewardError(f"hpsv2: there is no version {version!r}, choose one of {', '.join(HPS_FILES)}")
        self.version, self.architecture = version, architecture

    @cached_property
    def tokenizer(self) -> Callable[[list[str]], torch.Tensor]:
        """Open_clip's tokenizer: ids (b, 77)."""
        return open_clip.get_tokenizer(self.architecture)

    @cached_property
    def preprocessing(self) -> Preprocessing:
        """The CLIP's own, but that the whole picture is seen."""
        return replace(of_open_clip(self.model.visual.preprocess_cfg), fit="contain")

    def _load(self) -> nn.Module:
        weights = str(self.file(HPS_FILES[self.version]))
        return open_clip.create_model(self.architecture, pretrained=weights, precision=PRECISIONS[self.dtype])

    def _score(self, images: torch.Tensor, prompts: Sequence[str]) -> torch.Tensor:
        return self.cosine(images, prompts)

    @override
    def _embedded(self, images: torch.Tensor, prompts: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor]:
        seen = self.model.encode_image(self.pixels(images))
        return seen, encode_unique(lambda texts: self.model.encode_text(self.tokenizer(texts).to(self.device)), prompts)


class Aesthetic(PictureReward):
    """The LAION aesthetic predictor 2 (sac+logos+ava1-l14-linearMSE): people's mean rating, about 1 to 10, mostly 4 to 7.

    head(f / |f|) of the CLIP ViT-L/14 features f of the picture, whatever the prompt; DDPO (2305.13301) and Flow-GRPO train
    on it. It likes painterly, glowing, centred pictures, and is easily hacked.

        rewards: [{use: aesthetic, options: {batch_size: 16}}]

    Args:
        path: of the head's weights: a file, or a folder or hub id that holds aesthetic-model.pth (the same file renamed).
        architecture: of the CLIP, by open_clip's name.
        clip: the CLIP's weights: a tag of open_clip, which fetches them from the hub, or a file.
        batch_size: pictures at a time.
        dtype: of the CLIP: float32, bfloat16 or float16; the head is float32.
    """

    called = "aesthetic"
    weights = "trl-lib/ddpo-aesthetic-predictor"

    def __init__(
        self,
        path: str | None = None,
        *,
        architecture: str = "ViT-L-14-quickgelu",
        clip: str = "openai",
        **options: Any,
    ) -> None:
        super().__init__(path, **options)
        self.architecture, self.clip = architecture, str(clip)

    @cached_property
    def preprocessing(self) -> Preprocessing:
        """The CLIP's own."""
        return of_open_clip(self.model["visual"].preprocess_cfg)

    def _load(self) -> nn.Module:
        head = laion_aesthetic_head(part_of(weights_of(self.file("aesthetic-model.pth")), "layers."))
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
