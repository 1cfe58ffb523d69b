"""Modalities: what a pipeline makes (images, videos or audio), in which shape, and at which sampling rate."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from typing import Any, Literal

from diffusers import DiffusionPipeline

from flowgrpo.training.reports.samples import FRAME_RATE, SAMPLING_RATE

FRAMES = ("num_frames", "frames")  # what pipelines call the length of a video
DURATIONS = ("duration", "audio_duration", "audio_duration_s", "audio_end_in_s", "audio_length_in_s")  # and of a sound
RATES = ("frame_rate", "fps")  # and its frames per second, which is then an input of the model
# Frames per second that released video models were trained on, by how the names of their pipelines begin.
FRAME_RATES = {
    "Allegro": 15,
    "AnyFlow": 16,
    "ChronoEdit": 16,
    "CogVideoX": 8,
    "ConsisID": 8,
    "Cosmos2_5_Predict": 16,
    "Cosmos2_5_Transfer": 30,
    "EasyAnimate": 8,
    "Helios": 24,
    "Hunyuan": 24,
    "HunyuanVideoFramepack": 30,
    "Kandinsky5": 24,
    "LucyEdit": 24,
    "Mochi": 30,
    "MotifVideo": 24,
    "SanaImageToVideo": 16,
    "SanaVideo": 16,
    "SkyReels": 24,
    "Wan": 16,
    "WanAnimate": 30,
}


def modality_of(pipeline: type) -> Literal["image", "video", "audio"]:
    """Return what a pipeline class makes, by the arguments of its call; conditions of another modality do not matter."""
    arguments = inspect.signature(inspect.unwrap(pipeline.__call__)).parameters
    if any(name in arguments for name in (*FRAMES, "num_videos_per_prompt")):
        return "video"
    return "audio" if any(name in arguments for name in DURATIONS) else "image"


def task_of(pipeline: type, given: Collection[str]) -> str:
    """What the hub calls what a pipeline class does.

    Args:
        given: the arguments of its call that are given pictures, videos or sounds.

    Returns:
        `text-to-image`, `image-to-video` and so on; sounds are made by `text-to-audio` or `audio-to-audio`.
    """
    made = modality_of(pipeline)
    if made == "audio":
        return "audio-to-audio" if given else "text-to-audio"
    sources = {"video" if "video" in name else "audio" if "audio" in name else "image" for name in given}
    source = "video" if made == "video" and "video" in sources else "image" if sources - {"audio"} else "text"
    return f"{source}-to-{made}"


def expected_shape(pipeline: type, call: dict[str, Any]) -> tuple[int, ...]:
    """The shape of one sample, known before any weights are: (3, H, W) of an image, (F, 3, H, W), or (C, N) of audio.

    Sizes are those of `call`, else the defaults of the class, else 64 pixels and 8 frames. Audio is a second in stereo.
    """
    kind = modality_of(pipeline)
    if kind == "audio":
        return (2, SAMPLING_RATE)
    arguments = inspect.signature(inspect.unwrap(pipeline.__call__)).parameters

    def size(names: tuple[str, ...], unknown: int) -> int:
        asked = [value for name in names for value in (call.get(name), name in arguments and arguments[name].default)]
        return next((value for value in asked if isinstance(value, int) and value > 0), unknown)

    picture = (3, size(("height",), 64), size(("width",), 64))
    return picture if kind == "image" else (size(FRAMES, 8), *picture)


def sampling_rate(pipe: DiffusionPipeline) -> int | None:
    """Samples per second of what an audio pipeline makes, as one of its components says; None for other modalities."""
    if modality_of(type(pipe)) != "audio":
        return None
    for component in pipe.components.values():
        for name in ("sampling_rate", "sample_rate"):
            if rate := getattr(getattr(component, "config", None), name, None):
                return int(rate)
    return SAMPLING_RATE


def frame_rate(pipe: DiffusionPipeline, call: Mapping[str, Any]) -> float:
    """Frames per second of a pipeline's videos: what its call is told, else what its model was trained on, else 8."""
    arguments = inspect.signature(inspect.unwrap(type(pipe).__call__)).parameters
    for name in RATES:
        told = call.get(name, arguments[name].default) if name in arguments else None
        if isinstance(told, int | float) and told > 0:
            return float(told)
    if pipe.config.get("expand_timesteps"):  # Wan 2.2 of 5B, alone among the pipelines of its class
        return 24.0
    name = type(pipe).__name__
    known = max((start for start in FRAME_RATES if name.startswith(start)), key=len, default=None)
    return FRAME_RATE if known is None else float(FRAME_RATES[known])
