"""The colour of an object, named by a CLIP of transformers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import normalize
from transformers import AutoProcessor, CLIPModel

from rewards.models.model import pretrained


class ColourNamer:
    """Which of `colours` a crop of an object resembles most, zero-shot; a colour is the mean of GenEval's three sentences.

    Args:
        path: hub id or local folder.
    """

    def __init__(self, path: str, colours: Sequence[str], dtype: torch.dtype = torch.float32):
        self.processor = AutoProcessor.from_pretrained(path)
        self.model = pretrained(CLIPModel, path, dtype).eval()
        self.colours = colours
        self.texts: dict[str, torch.Tensor] = {}  # of each class, features (colours, D) on the CPU

    def to(self, device: str | torch.device) -> ColourNamer:
        """Move the model."""
        self.model.to(device)
        return self

    @torch.no_grad()
    def __call__(self, crops: Sequence[torch.Tensor], names: Sequence[str]) -> list[str]:
        """The colour of each crop, float (3, h, w) in [0, 1] of any size, which shows an object of the class named."""
        squares = [_middle(crop).to(self.model.device) for crop in crops]
        pixels = self.processor(images=squares, do_rescale=False, return_tensors="pt")["pixel_values"]
        features = self.model.get_image_features(pixel_values=pixels.to(self.model.device, self.model.dtype))
        features = normalize(features.pooler_output.float(), dim=-1).cpu()
        return [self.colours[int((self._text(name) @ f).argmax())] for name, f in zip(names, features, strict=True)]

    def _text(self, name: str) -> torch.Tensor:
        if name not in self.texts:
            sentences = [
                f"a photo of a {words}"
                for c in self.colours
                for words in (f"{c} {name}", f"{c}-colored {name}", f"{c} object")
            ]
            inputs = self.processor(text=sentences, padding=True, truncation=True, return_tensors="pt")
            features = self.model.get_text_features(**inputs.to(self.model.device)).pooler_output.float()
            mean = normalize(features, dim=-1).unflatten(0, (len(self.colours), -1)).mean(1)
            self.texts[name] = normalize(mean, dim=-1).cpu()
        return self.texts[name]


def _middle(crop: torch.Tensor) -> torch.Tensor:
    """The square in the middle, which is all that CLIP's preprocessing would leave of a crop blown up by its short side."""
    height, width = crop.shape[1:]
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    return crop[:, top : top + side, left : left + side]
