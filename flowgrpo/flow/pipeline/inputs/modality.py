"""Modality of a pipeline (images, videos or audio), and the shape, rate and sound of its samples."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import torch
from diffusers import DiffusionPipeline

from flowgrpo.training.reports.samples import FRAME_RATE, SAMPLING_RATE
from rewards.audio import Films

FRAMES = ("num_frames", "frames")  # arguments for the length of a video
DURATIONS = ("duration", "audio_duration", "audio_duration_s", "audio_end_in_s", "audio_length_in_s")  # and of a sound
RATES = ("frame_rate", "fps")  # arguments for frames per second, of models that take it as an input
# Frame rate of released models -> beginnings of their pipelines' class names; the longest beginning that fits decides.
FRAME_RATES = {
    8: ("CogVideoX", "ConsisID", "EasyAnimate"),
    15: ("Allegro",),
    16: ("AnyFlow", "ChronoEdit", "Cosmos2_5_Predict", "SanaImageToVideo", "SanaVideo", "Wan"),
    24: ("Helios", "Hunyuan", "Kandinsky5", "LucyEdit", "MotifVideo", "SkyReels"),
    30: ("Cosmos2_5_Transfer", "HunyuanVideoFramepack", "Mochi", "WanAnimate"),
}


def modality_of(pipeline: type) -> Literal["image", "video", "audio"]:
    """Return the modality of a pipeline class's samples, from the arguments of its call."""
    arguments = inspect.signature(inspect.unwrap(pipeline.__call__)).parameters
    if any(name in arguments for name in (*FRAMES, "num_videos_per_prompt")):
        return "video"
    return "audio" if any(name in arguments for name in DURATIONS) else "image"


def has_soundtrack(pipeline: type, call: Mapping[str, Any]) -> bool:
    """Return whether a pipeline class makes videos with sound, if called so: it denoises latents of both."""
    arguments = inspect.signature(inspect.unwrap(pipeline.__call__)).parameters
    return "audio_latents" in arguments and call.get("sample_audio", True)


def read_output(pipeline: type, output: Sequence[Any]) -> torch.Tensor | Films:
    """Return the float32 samples in the output of a pipeline's call: a tensor, or `Films` if it made videos with sound."""
    frames = output[0].float()
    if not has_soundtrack(pipeline, {}) or output[1] is None:
        return frames
    sound = output[1].float()
    return Films(frames, sound if sound.ndim == 3 else sound[:, None])


def task_of(pipeline: type, given: Collection[str]) -> str:
    """Return the hub's name for a pipeline's task (`image-to-video`, ...); `given` names the media arguments."""
    made = modality_of(pipeline)
    if made == "audio":
        return "audio-to-audio" if given else "text-to-audio"
    sources = {"video" if "video" in name else "audio" if "audio" in name else "image" for name in given}
    source = "video" if made == "video" and "video" in sources else "image" if sources - {"audio"} else "text"
    return f"{source}-to-{made}"


def expected_shape(pipeline: type, call: dict[str, Any]) -> tuple[int, ...]:
    """Return the shape of one sample before weights are loaded: (3, H, W), (F, 3, H, W), or (C, N) of audio.

    Sizes come from `call`, else from the class's defaults, else 64 pixels and 8 frames. Audio is a second of stereo.
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
    """Return the sampling rate in Hz of a pipeline's sounds, from its components' configs; None if it makes none."""
    if modality_of(type(pipe)) != "audio" and not has_soundtrack(type(pipe), {}):
        return None
    for name in (
        "output_sampling_rate",
        "sampling_rate",
        "sample_rate",
    ):  # a vocoder may have another rate than its VAE
        for component in pipe.components.values():
            if rate := getattr(getattr(component, "config", None), name, None):
                return int(rate)
    return SAMPLING_RATE


def frame_rate(pipe: DiffusionPipeline, call: Mapping[str, Any]) -> float:
    """Return the frames per second of a pipeline's videos: from the call, else of the released model, else `FRAME_RATE`."""
    arguments = inspect.signature(inspect.unwrap(type(pipe).__call__)).parameters
    for name in RATES:
        told = call.get(name, arguments[name].default) if name in arguments else None
        if isinstance(told, int | float) and told > 0:
            return float(told)
    if pipe.config.get("expand_timesteps"):  # only Wan 2.2 of 5B sets this
        return 24.0
    name = type(pipe).__name__
    known = [(len(start), rate) for rate, starts in FRAME_RATES.items() for start in starts if name.startswith(start)]
    return float(max(known)[1]) if known else FRAME_RATE
