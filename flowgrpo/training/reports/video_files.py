"""MP4 videos, written with ffmpeg if it is installed."""

from __future__ import annotations

import logging
import subprocess
from functools import lru_cache
from pathlib import Path

import numpy as np

QUALITY = "16"  # H.264's constant rate factor, visually lossless
# Sides are padded to even numbers for chroma subsampling. The colour space is the one that players assume for HD.
PIXELS = "pad=ceil(iw/2)*2:ceil(ih/2)*2,scale=out_color_matrix=bt709:out_range=tv"
COLOURS = ["-colorspace", "bt709", "-color_primaries", "bt709", "-color_trc", "bt709", "-color_range", "tv"]


@lru_cache(maxsize=1)
def ffmpeg() -> str | None:
    """Return the path of ffmpeg; None if the extra `video` is not installed."""
    try:
        from imageio_ffmpeg import get_ffmpeg_exe  # type: ignore[import-untyped]  # it has no types

        return get_ffmpeg_exe()
    except (ModuleNotFoundError, RuntimeError):
        return None


@lru_cache(maxsize=1)
def say_once_that_there_is_no_ffmpeg() -> None:
    """Log a warning, only once per process, that videos are written as WebP."""
    logging.getLogger(__name__).warning(
        "videos are written as .webp, without sound; for .mp4 install ffmpeg: pip install 'flowgrpo[video]'"
    )


def write_mp4(
    program: str, frames: np.ndarray, file: Path, frame_rate: float, *, soundtrack: Path | None = None
) -> None:
    """Write frames, uint8 (F, H, W, 3), as an H.264 video that browsers can stream. Raises OSError if ffmpeg failed.

    `soundtrack` is a .wav file, which becomes AAC.
    """
    _, height, width, _ = frames.shape
    source = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}", "-r", f"{frame_rate:g}", "-i", "pipe:0"]
    source += [] if soundtrack is None else ["-f", "wav", "-i", str(soundtrack)]
    run(program, [*source, "-vf", PIXELS], file, np.ascontiguousarray(frames).tobytes())


def run(program: str, source: list[str], file: Path, given: bytes | None = None) -> None:
    """Call ffmpeg to write one H.264 file; `given` is its standard input."""
    codec = ["-c:v", "libx264", "-crf", QUALITY, "-pix_fmt", "yuv420p", *COLOURS, "-threads", "1"]
    codec += ["-c:a", "aac", "-b:a", "192k"]  # of a sound, if there is one
    target = [*codec, "-fflags", "+bitexact", "-movflags", "+faststart", "-y", str(file.absolute())]
    command, stdin = [program, "-v", "error", *source, *target], subprocess.DEVNULL if given is None else None
    done = subprocess.run(command, input=given, stdin=stdin, capture_output=True, check=False)
    if done.returncode:
        words = " ".join(done.stderr.decode(errors="replace").split())[:300]
        raise OSError(f"ffmpeg could not write {file.name} ({words})")
