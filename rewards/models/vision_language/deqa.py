"""DeQA-Score: the technical quality of a picture by a vision-language model trained for it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import nn
from transformers import CLIPImageProcessor, PreTrainedConfig

from rewards.base import RewardError
from rewards.models.model import PictureReward, load_pretrained
from rewards.models.preprocessing import Preprocessing, of_transformers
from rewards.models.vision_language.deqa_network import DeqaConfig, DeqaNetwork

GRADES = (5.0, 4.0, 3.0, 2.0, 1.0)  # of excellent, good, fair, poor, bad


class DeQA(PictureReward):
    """DeQA-Score: the technical quality of a picture, 1 to 5, as people rated photographs (You et al., 2501.11561).

    The mean of the grades of excellent (5), good, fair, poor and bad (1), weighted with the softmax of their logits after
    "The quality of the image is". The prompt does not count. A picture that is not square gets bars of the mean colour. The
    network is mPLUG-Owl2 with 8.2 billion parameters; the authors' code does not run with transformers 5, so it is rebuilt
    here for their weights (`rewards.models.vision_language.deqa_network`). The softmax is float32; theirs is float16.

        rewards: [{use: deqa, options: {path: zhiyuanyou/DeQA-Score-Mix3, batch_size: 8, dtype: float16}}]

    Args:
        path: a folder or a hub id of a DeQA-Score (fully tuned, or with its LoRA merged) with its image processor.
        batch_size, dtype: of the model; dtype is float16, as released, bfloat16 or float32.
    """

    called = "deqa"
    weights = "zhiyuanyou/DeQA-Score-Mix3"

    def __init__(self, path: str | None = None, *, batch_size: int = 8, dtype: str = "float16") -> None:
        super().__init__(path, batch_size=batch_size, dtype=dtype)

    @cached_property
    def preprocessing(self) -> Preprocessing:
        """CLIP's preprocessing at the model's size."""
        with self.loading(self.path):
            return of_transformers(CLIPImageProcessor.from_pretrained(self.path))

    def _load(self) -> nn.Module:
        kind = PreTrainedConfig.get_config_dict(self.path)[0].get("model_type")
        if kind != DeqaConfig.model_type:
            raise RewardError(f"deqa: {self.path} holds a model of type {kind}, not {DeqaConfig.model_type}")
        try:
            return load_pretrained(DeqaNetwork, self.path, self.dtype)
        except RewardError as error:
            raise RewardError(f"deqa: {error}") from error

    def _score(self, images: torch.Tensor, prompts: Sequence[str]) -> torch.Tensor:
        logits = self.model(self.pixels(_square(images, self.preprocessing.mean))).float()
        return logits.softmax(-1) @ torch.tensor(GRADES, device=logits.device)


def _square(images: torch.Tensor, mean: tuple[float, float, float]) -> torch.Tensor:
    """Return pictures (b, 3, h, w) in the middle of squares of the mean colour, in whole levels of 255."""
    height, width = images.shape[-2:]
    side = max(height, width)
    top, left = (side - height) // 2, (side - width) // 2
    colour = images.new_tensor(mean).mul(255).floor() / 255
    square = colour[:, None, None].expand(len(images), -1, side, side).clone()
    square[..., top : top + height, left : left + width] = images
    return square
