"""Warnings about parts of the samples that are trained and that no reward sees."""

from __future__ import annotations

import inspect

from flowgrpo.flow.config import Config
from flowgrpo.flow.pipeline.inputs.modality import expected_shape, has_soundtrack, modality_of
from flowgrpo.flow.pipeline.loading.load import planned_class
from flowgrpo.schema.sections import RewardUse
from rewards import BUILT_IN
from rewards.base import find
from rewards.files import frames

SMALL = 0.1  # share of the frames


def unseen(config: Config) -> list[str]:
    """Return a sentence if rewards see less than `SMALL` of a video's frames, and one if no reward hears its sound."""
    pipeline = planned_class(config.model.path)
    if modality_of(pipeline) != "video":
        return []
    sentences, count = [], expected_shape(pipeline, config.model.call)[0]
    rules = [_rule(use) for use in config.rewards if use.of is None]
    seen = {index for rule in rules for index in frames.choose(rule, count)}
    if len(seen) < SMALL * count:
        sentences.append(
            f"rewards see {len(seen)} of the {count} frames that are trained, so the others may become anything; take more "
            "frames, such as every 8, or add a reward of whole videos"
        )
    if has_soundtrack(pipeline, config.model.call) and all(use.of is None for use in config.rewards):
        sentences.append(
            "the sound of these videos is trained too, and rewards see the pictures alone; add a reward of: soundtrack"
        )
    return sentences


def _rule(use: RewardUse) -> str | int:
    """Return the rule of `rewards.files.frames` by which a reward sees a video: of its use, or its own option `frames`."""
    option = inspect.signature(find(use.use)).parameters.get("frames") if use.use in BUILT_IN else None
    own = use.options.get("frames", option.default if option else "all")
    return use.frames if use.frames is not None else own
