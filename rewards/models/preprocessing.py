"""Preprocessing of vision models on tensors: resize, crop, normalise."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

import torch
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as F

BILINEAR = 2  # PIL's and transformers' number; the models here use this or bicubic
Fit = Literal["cover", "contain", "exact"]


@dataclass(frozen=True)
class Preprocessing:
    """A model's own preprocessing."""

    size: tuple[int, int]  # (H, W) of the antialiased resizing
    fit: Fit  # `cover` scales the shorter edge to `size`, `contain` the longer one, `exact` stretches
    crop: tuple[int, int] | None  # (H, W) of a central crop, padded with black
    _: KW_ONLY
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    interpolation: InterpolationMode = InterpolationMode.BICUBIC

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        """Convert pictures, float (B, 3, H, W) in [0, 1], to the model's input, float32 (B, 3, h, w).

        They are rounded to 8 bits first, so that a picture scores the same before and after it is saved. The models were
        trained on 8-bit pictures resized by PIL; this matches PIL to the bit or nearly.
        """
        pictures = to_bytes(images)
        pictures = F.resize(pictures, self._target_size(*images.shape[-2:]), self.interpolation, antialias=True)
        if self.crop is not None:
            pictures = F.center_crop(pictures, self.crop)
        return F.normalize(pictures / 255, self.mean, self.std)

    def _target_size(self, height: int, width: int) -> list[int]:
        if self.fit == "exact":
            return list(self.size)
        if self.fit == "contain":
            scale = min(self.size[0] / height, self.size[1] / width)
            return [round(height * scale), round(width * scale)]
        edge = self.size[0]
        long = int(edge * max(height, width) / min(height, width))
        return [edge, long] if height <= width else [long, edge]


def to_bytes(samples: torch.Tensor) -> torch.Tensor:
    """Round pictures or frames in [0, 1] to 8 bits."""
    return samples.float().clamp(0, 1).mul(255).round().byte()


def of_transformers(processor: Any) -> Preprocessing:
    """Read an image processor of transformers that resizes to a shortest edge or a size, crops and normalises."""
    size = {key: value for key, value in dict(processor.size).items() if value is not None}
    fit: Fit
    if set(size) == {"shortest_edge"}:
        fit, edges = "cover", (size["shortest_edge"],) * 2
    elif set(size) == {"height", "width"}:
        fit, edges = "exact", (size["height"], size["width"])
    else:
        kind = type(processor).__name__
        raise ValueError(f"{kind} resizes by {', '.join(size)}, not to a shortest edge or a height and width")
    crop = dict(processor.crop_size) if getattr(processor, "do_center_crop", None) else None
    crop_edges = (crop["height"], crop["width"]) if crop else None
    interpolation = InterpolationMode.BILINEAR if processor.resample == BILINEAR else InterpolationMode.BICUBIC
    mean, std = tuple(processor.image_mean), tuple(processor.image_std)
    return Preprocessing(edges, fit, crop_edges, mean=mean, std=std, interpolation=interpolation)


def of_open_clip(config: dict[str, Any]) -> Preprocessing:
    """Read the preprocessing configuration of open_clip (`open_clip.get_model_preprocess_cfg`)."""
    size = config["size"]
    edges = (size, size) if isinstance(size, int) else tuple(size)
    fits: dict[str, Fit] = {"shortest": "cover", "longest": "contain", "squash": "exact"}
    interpolation = InterpolationMode.BILINEAR if config["interpolation"] == "bilinear" else InterpolationMode.BICUBIC
    mean, std = tuple(config["mean"]), tuple(config["std"])
    return Preprocessing(edges, fits[config["resize_mode"]], edges, mean=mean, std=std, interpolation=interpolation)
