"""Rewards of picture features: similarity to a reference picture, and diversity within a group."""

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
        return self.load_pretrained(AutoModel)

    def _features(self, pictures: Iterable[torch.Tensor]) -> torch.Tensor:
        """Return normalised features (b, D) of pictures (3, H, W) of any size: a CLIP's projection, a DINO's first token."""
        pixels = torch.cat([self.pixels(picture[None]) for picture in pictures])
        encode = getattr(self.model, "get_image_features", self.model)
        return nn.functional.normalize(pooled_features(encode(pixel_values=pixels)).float(), dim=-1)


class ImageSimilarity(_Features):
    """Cosine of the features of a picture and of a reference picture: 1 for equal pictures, -1 to 1, mostly above 0.

    By default DINOv2 (2304.07193), as in the DINO score of subject-driven generation (2208.12242). `path` may be any vision
    model with pooled output that AutoModel of transformers loads, such as a CLIP (the CLIP-I score). A row without a
    reference scores None.

        prompts: {train: edits.jsonl}    # {"prompt": "the dog on a beach", "image": "dog.png"}
        rewards: [{use: image_similarity, options: {path: facebook/dinov2-base, column: image}}]

    Args:
        path: a folder or a hub id of a vision model with its image processor.
        column: the column of the prompt file that has the reference's file name.
        batch_size, dtype: of the model; dtype is float32, bfloat16 or float16.
    """

    called = "image_similarity"

    def __init__(self, path: str | None = None, column: str = "image", **options: Any) -> None:
        super().__init__(path, **options)
        self.column = column

    def __call__(self, images: torch.Tensor, prompts: Sequence[str], **columns: Sequence[Any]) -> list[float | None]:
        """Return one score per picture, float (B, 3, H, W) in [0, 1]; None if its row has no reference."""
        check_images(self.called, images)
        if self.column not in columns:
            raise RewardError(
                f"image_similarity needs the column {self.column!r} in the prompt file, the reference picture's file; "
                f"there {'are ' + ', '.join(columns) if columns else 'is none'}"
            )
        references = columns[self.column]
        rows = [i for i, reference in enumerate(references) if reference is not None]
        for reference in (references[i] for i in rows):
            if not isinstance(reference, str):
                column = f"the column {self.column!r}"
                raise RewardError(f"image_similarity: {column} must name one file, not be {reference!r}")
        values = self.score_batches(images[rows], [references[i] for i in rows]).tolist() if rows else []
        scores: list[float | None] = [None] * len(prompts)
        for i, value in zip(rows, values, strict=True):
            scores[i] = value
        return scores

    def _score(self, images: torch.Tensor, references: Sequence[str]) -> torch.Tensor:
        files = list(dict.fromkeys(references))
        features = self._features([*images, *map(_read, files)])
        rows = [len(images) + files.index(reference) for reference in references]
        return (features[: len(images)] * features[rows]).sum(-1)


class Diversity(_Features):
    """Distance of a picture from the others of its group: the mean of 1 - cosine of features, 0 (all equal) to 2.

    Its mean over a group is the mean distance of the pairs, so a group earns exactly its diversity. Use it with a low
    weight beside a reward of quality; alone it rewards noise. A group of one, as in evaluation, scores None. Ours.

        rewards: [{use: pickscore}, {use: diversity, weight: 0.1, options: {path: facebook/dinov2-base}}]

    Args:
        path: a folder or a hub id of a vision model with its image processor.
        batch_size, dtype: of the model; dtype is float32, bfloat16 or float16.
    """

    called = "diversity"
    group_wise = True

    def __call__(self, images: torch.Tensor, prompts: Sequence[str]) -> list[float] | list[None]:
        """Return one score per picture of one group, float (B, 3, H, W) in [0, 1]."""
        check_images(self.called, images)
        if len(images) == 1:
            return [None]
        features = self.score_batches(images)
        others = features.sum(0) - features
        return (1 - (features * others).sum(1) / (len(images) - 1)).tolist()

    def _score(self, images: torch.Tensor) -> torch.Tensor:
        return self._features(images)


def _read(file: str) -> torch.Tensor:
    try:
        return pil_to_tensor(media.picture(file)).float() / 255
    except media.MediaError as error:
        reference = f"the reference {file} is not a picture that can be read"
        raise RewardError(f"image_similarity: {reference} ({error})") from error
