"""Warnings about parts of the samples that are trained and that no reward sees."""

from __future__ import annotations

import inspect

from flowgrpo.errors import InputError
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
    seen = {index for use in config.rewards if use.of is None for index in _frames(use, count)}
    if len(seen) < SMALL * count:
        sentences.append(
            f"rewards see {len(seen)} of the {count} frames that are trained, so the others may become anything; take more "
            "frames, such as every 8, or add a reward of whole videos"
        )
    if has_soundtrack(pipeline, config.model.call) and not any(map(_hears, config.rewards)):
        sentences.append(
            "the sound of these videos is trained too, and rewards see the pictures alone; add a reward of: soundtrack"
        )
    return sentences


def _frames(use: RewardUse, count: int) -> list[int]:
    """Return the frames, of `count`, that a reward sees, by the rule of its use or by its own option `frames`."""
    if use.frames is not None:
        return frames.choose(use.frames, count)
    if use.use not in BUILT_IN or {"scores", "compare"} & use.options.keys():  # these options see whole samples
        return frames.choose("all", count)
    option = inspect.signature(find(use.use)).parameters.get("frames")
    try:
        return frames.choose(use.options.get("frames", option.default) if option else "all", count)
    except ValueError as error:
        raise InputError(f"rewards: {use.use}: options.{error}") from None


def _hears(use: RewardUse) -> bool:
    """Return whether a reward hears the sound of videos, as `Reward.hears` does, without making it."""
    if use.of is not None or use.use in BUILT_IN or use.use.startswith(("http://", "https://")):
        return use.of is not None
    found = find(use.use)
    called = found.__call__ if inspect.isclass(found) else found
    return "soundtrack" in inspect.signature(called).parameters
