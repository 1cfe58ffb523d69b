"""A second call for every specimen: other sizes, frames, strengths, masks, guidance and steps, derived from the first.

What a class cannot take is in `LIMITS`, for the docs, and what it takes instead in `OTHERWISE`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from PIL import Image

from zoo.base import Specimen, picture

NEGATIVE = "blurred"


def _frames(count: int) -> int:
    """As many groups of frames again behind the first frame."""
    return 2 * count - 1


def _guidance(scale: float | None) -> float | None:
    """On where it was off, and off where it was on."""
    return scale if scale is None else 2.5 if scale <= 1 else 1.0


# Each argument of a call that is changed, with the way to its second value.
CHANGES: dict[str, Callable[[Any], Any]] = {
    "num_inference_steps": lambda steps: steps + 1,
    "height": lambda height: 2 * height,
    **dict.fromkeys(("num_frames", "frames", "segment_frame_length"), _frames),
    **dict.fromkeys(("guidance_scale", "true_cfg_scale", "image_guidance_scale"), _guidance),
    "guidance_scale_2": lambda scale: scale + 1,
    "distilled_guidance_scale": lambda scale: scale / 2,
    "pag_scale": lambda scale: scale / 2,
    "strength": lambda strength: 0.6 if strength == 0.8 else 0.8,
    **dict.fromkeys(("audio_duration", "audio_duration_s", "duration"), lambda seconds: 1.5 * seconds),
    "audio_cover_strength": lambda strength: 1.5 * strength,
    "mask_end_seconds": lambda seconds: 1.5 * seconds,
}
OTHERWISE: dict[str, dict[str, Any]] = {
    "EasyAnimateInpaintPipeline": {"negative_prompt": NEGATIVE},
    "EasyAnimatePipeline": {"negative_prompt": NEGATIVE},
    "HeliosPipeline": {"num_frames": 5},
    "HeliosPipeline (picture)": {"num_frames": 5},
    "HunyuanVideoFramepackPipeline": {"num_frames": 5},
}
CHUNKS = "`num_frames` of more than one chunk: refused, because each chunk runs the schedule again"
UNNAMED = "guidance without a `negative_prompt`: refused; diffusers' own pipeline fails too"
LIMITS: dict[str, str] = {
    "EasyAnimateInpaintPipeline": UNNAMED,
    "EasyAnimatePipeline": UNNAMED,
    "HeliosPipeline": CHUNKS,
    "HunyuanVideoFramepackPipeline": CHUNKS,
    "LTXConditionPipeline": "a picture with an `image_cond_noise_scale` above 0 (the default): refused, because a whole run "
    "draws noise for the picture before each step; set it to 0",
    "ZImageOmniPipeline": "pictures decoded together and alone differ by the last bit of bfloat16, its autoencoder's dtype",
}


def second(name: str, specimen: Specimen) -> Specimen:
    """The specimen with its second call and second columns."""
    call = {k: CHANGES[k](v) if k in CHANGES else v for k, v in specimen.call.items()}
    if (call.get("true_cfg_scale") or 0) > 1:  # guided where there is something to be guided from
        call.setdefault("negative_prompt", NEGATIVE)
    call |= OTHERWISE.get(name, {})
    columns = {k: _column(k, v) for k, v in specimen.columns.items()}
    return replace(specimen, call=call, columns=columns)


def _column(name: str, value: Any) -> Any:
    """Other pictures, twice as high; masks that are white but for their upper quarter; videos of more frames."""
    if isinstance(value, list):
        moving = "video" in name or "mask" in name
        more = value + value[:-1] if moving else value
        return [_column(name, one) for one in more]
    if not isinstance(value, Image.Image):
        return value
    width, height = value.width, 2 * value.height
    if "mask" not in name:
        return picture(int(np.asarray(value).sum()) % 97, width, height)
    mask = Image.new(value.mode, (width, height), "white")
    mask.paste("black", (0, 0, width, height // 4))
    return mask
