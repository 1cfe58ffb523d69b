"""Rewards of picture features: likeness to a reference picture, and diversity within a group."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torchvision.transforms.functional import pil_to_tensor
from transformers import AutoModel

from rewards.base import RewardError
from rewards.files import media
from rewards.image import check_images
from rewards.models.model import PictureReward, pooled_features


class _Features(PictureReward):
    weights = "facebook/dinov2-base"

    def _load(self) -> nn.Module:
        return self.pretrained(AutoModel)

    def _features(self, pictures: Iterable[torch.Tensor]) -> torch.Tensor:
        """Features (b, D), of length 1, of pictures (3, H, W) of any sizes: a CLIP's projection, a DINO's first token."""
        pixels = torch.cat([self.pixels(picture[None]) for picture in pictures])
        encode = getattr(self.model, "get_image_features", self.model)
        return nn.functional.normalize(pooled_features(encode(pixel_values=pixels)).float(), dim=-1)


class ImageSimilarity(_Features):
    """Cosine of the features of a picture and of a reference picture: 1 for the same picture, -1 to 1, mostly above 0.

    DINOv2 (2304.07193) by default, as in the DINO score of subject-driven generation (2208.12242); any vision model that
    transformers' AutoModel loads and that pools does, CLIP among them (the CLIP-I score). A row without a reference is not
    applicable.

        prompts: {train: edits.jsonl}    # {"prompt": "the dog on a beach", "image": "dog.png"}
        rewards: [{use: image_similarity, options: {path: facebook/dinov2-base, column: image}}]

    Args:
        path: a vision model with its image processor: a folder or a hub id.
        column: of the prompt file, that names the reference's file.
        batch_size: pictures at a time.
        dtype: float32, bfloat16 or float16.
    """

    called = "image_similarity"

    def __init__(self, path: str | None = None, column: str = "image", **options: Any) -> None:
        super().__init__(path, **options)
        self.column = column

    def __call__(self, images: torch.Tensor, prompts: Sequence[str], **columns: Sequence[Any]) -> list[float | None]:
        """One score per picture, float (B, 3, H, W) in [0, 1]; None where its row names no reference.

        Raises:
            RewardError: no row has such a column, or a reference cannot be read.
        """
        check_images(self.called, images)
        if self.column not in columns:
            raise RewardError(
                f"image_similarity needs the column {self.column!r} in the prompt file, the reference picture's file; "
                f"there {'are ' + ', '.join(columns) if columns else 'is none'}"
            )
        references = columns[self.column]
        rows = [i for i, reference in enumerate(references) if reference is not None]
        for i in rows:
            if not isinstance(references[i], str):
                raise RewardError(
                    f"image_similarity: the column {self.column!r} must name one file, not be {references[i]!r}"
                )
        scores: list[float | None] = [None] * len(prompts)
        if rows:
            values = self.batched(images[rows], [references[i] for i in rows]).tolist()
            for i, value in zip(rows, values, strict=True):
                scores[i] = value
        return scores

    def _score(self, images: torch.Tensor, references: Sequence[str]) -> torch.Tensor:
        each = list(dict.fromkeys(references))
        features = self._features([*images, *map(_read, each)])
        own, theirs = features[: len(images)], features[len(images) :]
        return (own * theirs[[each.index(reference) for reference in references]]).sum(-1)


class Diversity(_Features):
    """How far a picture is from the others of its group: the mean of 1 - cosine of features, 0 (all the same) to 2.

    The mean over a group is the mean distance of its pairs, so a group earns exactly its diversity. Weigh it low, beside a
    reward of quality: alone it rewards noise. A group of one, as in evaluation, is not applicable. Ours.

        rewards: [{use: pickscore}, {use: diversity, weight: 0.1, options: {path: facebook/dinov2-base}}]

    Args:
        path: a vision model with its image processor: a folder or a hub id.
        batch_size: pictures at a time.
        dtype: float32, bfloat16 or float16.
    """

    called = "diversity"
    group_wise = True

    def __call__(self, images: torch.Tensor, prompts: Sequence[str]) -> list[float] | list[None]:
        """One score per picture of one group, float (B, 3, H, W) in [0, 1]; the prompts are not read."""
        check_images(self.called, images)
        if len(images) == 1:
            return [None]
        features = self.batched(images)
        others = features.sum(0) - features
        return (1 - (features * others).sum(1) / (len(images) - 1)).tolist()

    def _score(self, images: torch.Tensor) -> torch.Tensor:
        return self._features(images)


def _read(file: str) -> torch.Tensor:
    try:
        return pil_to_tensor(media.picture(file)).float() / 255
    except media.MediaError as error:
        raise RewardError(
            f"image_similarity: the reference {file} is not a picture that can be read ({error})"
        ) from error
