"""Models for GenEval: object detectors, called with (images, names, threshold), and a classifier of colours."""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Self

import torch
import transformers
from torch.nn.functional import interpolate, normalize
from torchvision.ops import box_convert, clip_boxes_to_image, nms

from rewards.base import RewardError
from rewards.models.model import load_pretrained
from rewards.objects.rules import Detection

MOST_OVERLAP = 0.5  # two OWLv2 boxes of a class with a larger intersection over union are one object
Found = dict[str, list[Detection]]  # by class, of one picture

# Label files' names of COCO's classes -> GenEval's names.
GENEVAL_NAMES = {
    "aeroplane": "airplane",
    "diningtable": "dining table",
    "keyboard": "computer keyboard",
    "motorbike": "motorcycle",
    "mouse": "computer mouse",
    "pottedplant": "potted plant",
    "remote": "tv remote",
    "sofa": "couch",
    "tvmonitor": "tv",
}


def load_detector(path: str, dtype: torch.dtype = torch.float32) -> Detector:
    """Load the detector of a hub id or local folder; raise RewardError if its type is unknown."""
    kinds = {"mask2former": Mask2Former, "owlv2": Owlv2}
    kind = transformers.AutoConfig.from_pretrained(path).model_type
    if kind not in kinds:
        raise RewardError(f"the detector {path!r} is a {kind}, not one of {', '.join(kinds)}")
    return kinds[kind](path, dtype)


class Detector(ABC):
    """A model that finds objects, and the processor of its inputs."""

    processor: Any
    model: transformers.PreTrainedModel

    def to(self, device: str | torch.device) -> Self:
        """Move the model."""
        self.model.to(device)
        return self

    @torch.no_grad()
    def __call__(self, images: torch.Tensor, names: Sequence[str], threshold: float) -> list[Found]:
        """Return the objects of each picture, float (B, 3, H, W) in [0, 1], by class, with a score above `threshold`."""
        return self._find(images.to(self.model.device), names, threshold)

    @abstractmethod
    def _find(self, images: torch.Tensor, names: Sequence[str], threshold: float) -> list[Found]:
        """Detect objects in pictures on the model's device."""


class Mask2Former(Detector):
    """Detector of objects with masks, for the classes that a Mask2Former was trained on.

    The score is the class probability times the mean probability of the mask's pixels, as in mmdet and in transformers'
    `post_process_instance_segmentation`. Unlike theirs, masks have the picture's size, not 384 x 384, and no padding.
    """

    def __init__(self, path: str, dtype: torch.dtype):
        self.processor = transformers.AutoImageProcessor.from_pretrained(path)
        self.model = load_pretrained(transformers.Mask2FormerForUniversalSegmentation, path, dtype).eval()
        labels = {number: name.lower() for number, name in self.model.config.id2label.items()}
        self.numbers = {GENEVAL_NAMES.get(name, name): number for number, name in labels.items()}

    def _find(self, images: torch.Tensor, names: Sequence[str], threshold: float) -> list[Found]:
        numbers = [self._number(name) for name in names]
        inputs = self.processor(images=list(images), do_rescale=False, return_tensors="pt")
        outputs = self.model(**inputs.to(self.model.device, self.model.dtype))
        padded, (height, width) = inputs["pixel_values"].shape[-2:], inputs["pixel_mask"][0].nonzero().amax(0) + 1
        found = []
        for classes, masks in zip(outputs.class_queries_logits, outputs.masks_queries_logits, strict=True):
            probability = classes.float().softmax(-1)[:, numbers]  # (queries, names)
            candidates = probability.amax(1) > threshold
            scaled = interpolate(masks[candidates, None].float(), padded, mode="bilinear")[..., :height, :width]
            scaled = interpolate(scaled, images.shape[-2:], mode="bilinear")[:, 0]
            masks = scaled > 0
            confidence = (scaled.sigmoid() * masks).sum((1, 2)) / (masks.sum((1, 2)) + 1e-6)
            found.append(_by_name(names, probability[candidates] * confidence[:, None], masks, threshold))
        return found

    def _number(self, name: str) -> int:
        if name not in self.numbers:
            close = difflib.get_close_matches(name, self.numbers, 1) or list(self.numbers)[:5]
            raise RewardError(
                f"the detector knows no class {name!r}, it has {', '.join(close)}; an OWLv2 such as "
                "google/owlv2-base-patch16-ensemble knows any"
            )
        return self.numbers[name]


def _by_name(names: Sequence[str], scores: torch.Tensor, masks: torch.Tensor, threshold: float) -> Found:
    """Return detections of each name from `scores` (N, names) and `masks` (N, H, W)."""
    boxes = [_box(mask) if mask.any() else None for mask in masks]
    found: Found = {}
    for name, column in zip(names, scores.T.tolist(), strict=True):
        rows = zip(boxes, column, masks, strict=True)
        found[name] = [Detection(box, score, mask) for box, score, mask in rows if box and score > threshold]
    return found


def _box(mask: torch.Tensor) -> tuple[float, float, float, float]:
    (top, left), (bottom, right) = (edge.tolist() for edge in mask.nonzero().aminmax(dim=0))
    return left, top, right + 1, bottom + 1


class Owlv2(Detector):
    """Detector of boxes without masks, for a class of any name; a box may count for several classes."""

    def __init__(self, path: str, dtype: torch.dtype):
        self.processor = transformers.AutoProcessor.from_pretrained(path)
        self.model = load_pretrained(transformers.Owlv2ForObjectDetection, path, dtype).eval()

    def _find(self, images: torch.Tensor, names: Sequence[str], threshold: float) -> list[Found]:
        height, width = images.shape[-2:]
        texts = [[f"a photo of a {name}" for name in names]] * len(images)
        inputs = self.processor(text=texts, images=list(images), do_rescale=False, return_tensors="pt")
        outputs = self.model(**inputs.to(self.model.device, self.model.dtype))
        boxes = box_convert(outputs.pred_boxes.float(), "cxcywh", "xyxy") * max(height, width)  # of the padded square
        boxes = clip_boxes_to_image(boxes, (height, width))
        return [
            {name: _suppress(boxes[i], scores[:, j], threshold) for j, name in enumerate(names)}
            for i, scores in enumerate(outputs.logits.float().sigmoid())
        ]


def _suppress(boxes: torch.Tensor, scores: torch.Tensor, threshold: float) -> list[Detection]:
    boxes, scores = boxes[scores > threshold], scores[scores > threshold]
    best = nms(boxes, scores, MOST_OVERLAP)
    rows = zip(boxes[best].tolist(), scores[best].tolist(), strict=True)
    return [Detection(tuple(box), score) for box, score in rows]


class ColourNamer:
    """A zero-shot CLIP classifier of an object's colour; a colour's text feature is the mean over GenEval's 3 sentences."""

    def __init__(self, path: str, colours: Sequence[str], dtype: torch.dtype = torch.float32):
        self.processor = transformers.AutoProcessor.from_pretrained(path)
        self.model = load_pretrained(transformers.CLIPModel, path, dtype).eval()
        self.colours = colours
        self.texts: dict[str, torch.Tensor] = {}  # features (colours, D) of each class

    def to(self, device: str | torch.device) -> ColourNamer:
        """Move the model."""
        self.model.to(device)
        return self

    @torch.no_grad()
    def __call__(self, crops: Sequence[torch.Tensor], names: Sequence[str]) -> list[str]:
        """Return the colour of each crop, float (3, h, w) in [0, 1] of any size, of an object of the named class."""
        squares = [_central_square(crop).to(self.model.device) for crop in crops]
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


def _central_square(crop: torch.Tensor) -> torch.Tensor:
    """Cut out the central square of a crop, the part that CLIP's preprocessing keeps."""
    height, width = crop.shape[1:]
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    return crop[:, top : top + side, left : left + side]
