"""The `geneval` reward: objects of the prompt in its picture, with their counts, colours and places.

GenEval's evaluation (arXiv 2310.11513; evaluation/evaluate_images.py) with its columns `tag`, `include` and `exclude`, on
detectors of transformers in place of mmdet's. The rules are in `rewards.objects.rules`. Credits:

    official    1 or 0 as GenEval counts: the counts are reached, and nothing occurs that `exclude` forbids
    strict      1 or 0: the counts are exact (the accuracy that Flow-GRPO reports while it trains)
    partial     the mean over all requirements (the reward that Flow-GRPO trains on, arXiv 2505.05470)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from rewards.base import RewardError
from rewards.compute import DTYPES, batched, default_device
from rewards.image import check_images
from rewards.models import hub
from rewards.objects.rules import COLOURS, Clause, crop, official, partial_credit, read_clauses, strict, surest

CREDITS = ("official", "strict", "partial")
Column = Sequence[Any] | None


class GenEval:
    """Share of a prompt's objects, counts, colours and places that its picture shows; None if the column `include` is empty.

    The prompts are a .jsonl file with GenEval's columns `tag`, `include` and `exclude`.

    Options:
        credit: partial (default), strict or official.
        detector: hub id or folder of a Mask2Former for instances (knows its training classes; GenEval uses COCO's) or of an
            OWLv2 (any class; GenEval's thresholds were not tuned for its scores). From Python also a function (images,
            names, threshold) -> a list of `Objects`.
        colours: hub id or folder of the CLIP that names colours; also a function (crops, names) -> colours.
        threshold, counting_threshold: minimum score of an object; the second where `tag` is counting.
        batch_size, dtype, device: of both models; dtype is float32, bfloat16 or float16, device by default the GPU if any.
    """

    def __init__(
        self,
        credit: str = "partial",
        *,
        detector: str | Callable = "facebook/mask2former-swin-small-coco-instance",
        colours: str | Callable = "openai/clip-vit-large-patch14",
        threshold: float = 0.3,
        counting_threshold: float = 0.9,
        batch_size: int = 8,
        dtype: str = "float32",
        device: str | None = None,
    ):
        for option, value, choices in (("credit", credit, CREDITS), ("dtype", dtype, DTYPES)):
            if value not in choices:
                raise RewardError(f"the geneval reward has no {option} {value!r}, choose one of {', '.join(choices)}")
        if batch_size < 1:
            raise RewardError(f"the geneval reward needs a batch_size of 1 or more, not {batch_size}")
        self.credit, self.detector, self.colours = credit, detector, colours
        self.threshold, self.counting_threshold = threshold, counting_threshold
        self.batch_size, self.dtype, self.device = batch_size, DTYPES[dtype], device or default_device()

    def to(self, device: str | torch.device) -> GenEval:
        """Move the models, now or when they are loaded."""
        self.device = device
        for loaded in ("_detect", "_name_colours"):
            if hasattr(self.__dict__.get(loaded), "to"):
                self.__dict__[loaded].to(device)
        return self

    def __call__(
        self,
        images: torch.Tensor,
        prompts: Sequence[str],
        *,
        include: Column = None,
        exclude: Column = None,
        tag: Column = None,
    ) -> list[float | None]:
        """Return one value per picture, float (B, 3, H, W) in [0, 1]."""
        check_images("geneval", images)
        if include is None:
            raise RewardError("the geneval reward needs prompts with the column include, see GenEval's metadata")
        nothing = [None] * len(prompts)
        rows = list(zip(prompts, include, exclude or nothing, tag or nothing, strict=True))
        values: list[float | None] = list(nothing)
        asked = [i for i, row in enumerate(rows) if row[1]]
        for part in batched(asked, self.batch_size):
            pictures = images[part].float().to(self.device)
            for i, value in zip(part, self._score(pictures, [rows[i] for i in part]), strict=True):
                values[i] = value
        return values

    def _score(self, images: torch.Tensor, rows: Sequence[tuple]) -> list[float]:
        include = [read_clauses(row[1], f"include of the prompt {row[0]!r}") for row in rows]
        exclude = [read_clauses(row[2] or (), f"exclude of the prompt {row[0]!r}") for row in rows]
        thresholds = [self.counting_threshold if row[3] == "counting" else self.threshold for row in rows]
        names = sorted({clause.name for clauses in (*include, *exclude) for clause in clauses})
        found = self._detect(images, names, min(thresholds))
        objects = [surest(each, threshold) for each, threshold in zip(found, thresholds, strict=True)]
        self._set_colours(images, objects, include)
        if self.credit == "official":
            return [float(official(*row)) for row in zip(objects, include, exclude, strict=True)]
        credit = partial_credit if self.credit == "partial" else strict
        return [float(credit(*row)) for row in zip(objects, include, strict=True)]

    def _set_colours(self, images: torch.Tensor, objects: list[dict], include: Sequence[Sequence[Clause]]) -> None:
        """Set the colour of all objects whose clause asks for one."""
        asked = dict.fromkeys((i, c.name) for i, clauses in enumerate(include) for c in clauses if c.colour)
        places = [(i, name, k) for i, name in asked for k in range(len(objects[i].get(name, ())))]
        for part in batched(places, self.batch_size):
            crops = [crop(images[i], objects[i][name][k]) for i, name, k in part]
            colours = self._name_colours(crops, [name for _, name, _ in part])
            for (i, name, k), colour in zip(part, colours, strict=True):
                objects[i][name][k] = replace(objects[i][name][k], colour=colour)

    @cached_property
    def _detect(self) -> Callable:
        from rewards.objects.detectors import load_detector

        return self._load("detector", lambda path: load_detector(path, self.dtype))

    @cached_property
    def _name_colours(self) -> Callable:
        from rewards.objects.detectors import ColourNamer

        return self._load("colours", lambda path: ColourNamer(path, COLOURS, self.dtype))

    def _load(self, option: str, load: Callable) -> Callable:
        given = getattr(self, option)
        if callable(given):
            return given
        try:
            with hub.cache_if_unreachable(given):
                return load(given).to(self.device)
        except OSError as error:
            reason = None if Path(given).exists() else hub.explain_failure(error, given, "give a folder that holds it")
            neither = "is neither a folder with a model nor one on the hub that can be reached"
            raise RewardError(f"geneval's {option}: {given!r} {reason or neither}") from error
