"""Object detectors of transformers, called as `detector(images, names, threshold)`, that find objects of given classes."""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch.nn.functional import interpolate
from torchvision.ops import box_convert, clip_boxes_to_image, nms
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoProcessor,
    Mask2FormerForUniversalSegmentation,
    Owlv2ForObjectDetection,
    PreTrainedModel,
)

from rewards.base import RewardError
from rewards.models.model import pretrained
from rewards.objects.rules import Detection

MOST_OVERLAP = 0.5  # intersection over union of two boxes of a class, above which OWLv2 has found one object twice

# GenEval's names of COCO's classes, by those that label files have for them.
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
    """The detector of a hub id or local folder.

    Raises:
        RewardError: the model there is of no kind that is known.
    """
    kinds = {"mask2former": Mask2Former, "owlv2": Owlv2}
    kind = AutoConfig.from_pretrained(path).model_type
    if kind not in kinds:
        raise RewardError(f"the detector {path!r} is a {kind}, not one of {', '.join(kinds)}")
    return kinds[kind](path, dtype)


class Detector(ABC):
    """A model that finds objects, and the `processor` of its inputs."""

    processor: Any
    model: PreTrainedModel

    def to(self, device: str | torch.device) -> Self:
        """Move the model."""
        self.model.to(device)
        return self

    @torch.no_grad()
    def __call__(
        self, images: torch.Tensor, names: Sequence[str], threshold: float
    ) -> list[dict[str, list[Detection]]]:
        """For each picture, float (B, 3, H, W) in [0, 1], its objects of each named class with a score above `threshold`.

        Raises:
            RewardError: the model does not know a class.
        """
        return self._find(images.to(self.model.device), names, threshold)

    @abstractmethod
    def _find(self, images: torch.Tensor, names: Sequence[str], threshold: float) -> list[dict[str, list[Detection]]]:
        """The same of pictures on the model's device."""


class Mask2Former(Detector):
    """Objects of the classes that a Mask2Former was trained on, with masks.

    The score is the class probability times the mean probability of the mask's pixels, as in mmdet and in transformers'
    `post_process_instance_segmentation`, from which this differs: masks have the picture's size rather than 384 x 384, and
    what was padded is cut off.
    """

    def __init__(self, path: str, dtype: torch.dtype):
        self.processor = AutoImageProcessor.from_pretrained(path)
        self.model = pretrained(Mask2FormerForUniversalSegmentation, path, dtype).eval()
        labels = {number: name.lower() for number, name in self.model.config.id2label.items()}
        self.numbers = {GENEVAL_NAMES.get(name, name): number for number, name in labels.items()}

    def _find(self, images: torch.Tensor, names: Sequence[str], threshold: float) -> list[dict[str, list[Detection]]]:
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
            sure = (scaled.sigmoid() * masks).sum((1, 2)) / (masks.sum((1, 2)) + 1e-6)
            found.append(_by_name(names, probability[candidates] * sure[:, None], masks, threshold))
        return found

    def _number(self, name: str) -> int:
        if name not in self.numbers:
            close = difflib.get_close_matches(name, self.numbers, 1) or list(self.numbers)[:5]
            raise RewardError(
                f"the detector knows no class {name!r}, it has {', '.join(close)}; an OWLv2 such as "
                "google/owlv2-base-patch16-ensemble knows any"
            )
        return self.numbers[name]


def _by_name(
    names: Sequence[str], scores: torch.Tensor, masks: torch.Tensor, threshold: float
) -> dict[str, list[Detection]]:
    """Detections of each name from `scores` (N, names) and `masks` (N, H, W)."""
    boxes = [_box(mask) if mask.any() else None for mask in masks]
    return {
        name: [
            Detection(box, score, mask)
            for box, score, mask in zip(boxes, column, masks, strict=True)
            if box and score > threshold
        ]
        for name, column in zip(names, scores.T.tolist(), strict=True)
    }


def _box(mask: torch.Tensor) -> tuple[float, float, float, float]:
    (top, left), (bottom, right) = (edge.tolist() for edge in mask.nonzero().aminmax(dim=0))
    return left, top, right + 1, bottom + 1


class Owlv2(Detector):
    """Objects of any class, by its name in words; boxes without masks. A box may count for several classes."""

    def __init__(self, path: str, dtype: torch.dtype):
        self.processor = AutoProcessor.from_pretrained(path)
        self.model = pretrained(Owlv2ForObjectDetection, path, dtype).eval()

    def _find(self, images: torch.Tensor, names: Sequence[str], threshold: float) -> list[dict[str, list[Detection]]]:
        height, width = images.shape[-2:]
        texts = [[f"a photo of a {name}" for name in names]] * len(images)
        inputs = self.processor(text=texts, images=list(images), do_rescale=False, return_tensors="pt")
        outputs = self.model(**inputs.to(self.model.device, self.model.dtype))
        boxes = box_convert(outputs.pred_boxes.float(), "cxcywh", "xyxy") * max(height, width)  # of the padded square
        boxes = clip_boxes_to_image(boxes, (height, width))
        return [
            {name: _suppressed(boxes[i], scores[:, j], threshold) for j, name in enumerate(names)}
            for i, scores in enumerate(outputs.logits.float().sigmoid())
        ]


def _suppressed(boxes: torch.Tensor, scores: torch.Tensor, threshold: float) -> list[Detection]:
    boxes, scores = boxes[scores > threshold], scores[scores > threshold]
    kept = nms(boxes, scores, MOST_OVERLAP)
    return [
        Detection(tuple(box), score) for box, score in zip(boxes[kept].tolist(), scores[kept].tolist(), strict=True)
    ]
