"""Embed pictures, videos and sounds in a page, small enough for many of them."""

from __future__ import annotations

import base64
import io
import tempfile
from functools import lru_cache
from pathlib import Path

import numpy as np
from PIL import ImageSequence

from flowgrpo.training.reports import video_files
from rewards.files import films, media, suffixes

LARGEST_SIDE = 384  # pixels of an embedded picture or video
LONGEST = 15  # seconds of embedded sound
HIGHEST_RATE = 24000  # samples per second
BARS = 72  # of a sound's outline


def data_url(path: Path) -> str:
    """Return a picture as WebP, a film as MP4 (both within `LARGEST_SIDE`), or the start of a sound as WAV; cached."""
    return _data_url(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=4096)
def _data_url(path: Path, modified: int) -> str:
    suffix = suffixes.suffix_of(path)
    if suffix in suffixes.SOUNDS:
        kind, data = "audio/wav", _sound(path)
    elif suffix in suffixes.FILMS:
        kind, data = "video/mp4", _film(path)
    else:
        kind, data = "image/webp", _picture(path)
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def outline(path: Path) -> str | None:
    """Return the peaks of a sound as an SVG path of upright bars, 3 x 40 units each; None for other files."""
    if suffixes.suffix_of(path) not in suffixes.SOUNDS:
        return None
    _, samples = _read(path)
    peaks = [part.max(initial=0) for part in np.array_split(np.abs(samples).max(1), BARS)]
    heights = [max(0.5, 18 * float(min(peak, 1))) for peak in peaks]
    return "".join(f"M{3 * i + 1.5} {20 - h:.1f}V{20 + h:.1f}" for i, h in enumerate(heights))


def pixel_difference(before: Path, after: Path) -> float | None:
    """Return the mean absolute difference of two pictures in [0, 1]; None if one is a film, a sound or a text."""
    if {suffixes.suffix_of(before), suffixes.suffix_of(after)} & {*suffixes.FILMS, *suffixes.SOUNDS, *suffixes.TEXTS}:
        return None
    first, second = media.picture(before), media.picture(after)
    second = second.resize(first.size)
    return float(np.abs(np.asarray(first, np.float64) - np.asarray(second, np.float64)).mean() / 255)


def _picture(path: Path) -> bytes:
    frames, durations = [], []
    with media.open_picture(path) as image:
        if image.format == "WEBP" and getattr(image, "n_frames", 1) > 1 and max(image.size) <= LARGEST_SIDE:
            return path.read_bytes()
        for frame in media.check_frames(path, ImageSequence.Iterator(image)):
            small = media.rgb(frame)
            small.thumbnail((LARGEST_SIDE, LARGEST_SIDE))
            frames.append(small)
            durations.append(frame.info.get("duration", 0))
    buffer = io.BytesIO()
    first, *others = frames
    effort = 4 if others else 6
    first.save(
        buffer, "WEBP", save_all=True, append_images=others, duration=durations, loop=0, quality=90, method=effort
    )
    return buffer.getvalue()


def _film(path: Path) -> bytes:
    """Return a small MP4 unchanged, and any other film as a small MP4."""
    program, is_mp4 = video_files.ffmpeg(), suffixes.suffix_of(path) == ".mp4"
    if is_mp4 and program is None:
        return path.read_bytes()
    fits = max(media.film(path)[0].size) <= LARGEST_SIDE
    if is_mp4 and fits:
        return path.read_bytes()
    assert program is not None  # else `media.film` has raised
    sides = f"'min(iw,{LARGEST_SIDE})':'min(ih,{LARGEST_SIDE})'"
    colours = "out_color_matrix=bt709:out_range=tv"  # as `video_files.run` tags them
    scale = f"scale={sides}:force_original_aspect_ratio=decrease:force_divisible_by=2:{colours}"
    with path.open("rb") as opened, tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "small.mp4"
        source = ["-protocol_whitelist", "file", "-f", films.detect_container(opened), "-i", str(path.absolute())]
        try:
            video_files.run(program, [*source, "-ac", "2", "-vf", scale], file)
        except OSError as error:
            raise media.MediaError(f"{path} cannot be shown ({error})") from error
        return file.read_bytes()


def _sound(path: Path) -> bytes:
    rate, samples = _read(path)
    if rate > HIGHEST_RATE:
        from scipy.signal import resample_poly  # imported here, for it takes a second

        samples, rate = resample_poly(samples, HIGHEST_RATE, rate), HIGHEST_RATE
    from scipy.io import wavfile  # imported here, for it takes a tenth of a second

    buffer = io.BytesIO()
    wavfile.write(buffer, rate, (samples.clip(-1, 1) * 32767).round().astype(np.int16))
    return buffer.getvalue()


def _read(path: Path) -> tuple[int, np.ndarray]:
    """Return the rate and the first `LONGEST` seconds of a .wav file, float32 (N, C) in [-1, 1]."""
    rate, samples = media.sound(path)
    samples = samples[: LONGEST * rate]
    scale = np.iinfo(samples.dtype).max if np.issubdtype(samples.dtype, np.integer) else 1
    return rate, (samples.astype(np.float32) / scale).reshape(len(samples), -1)
