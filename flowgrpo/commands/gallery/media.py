"""What the page embeds of a sample: its picture, video or sound, small enough for a page of many."""

from __future__ import annotations

import base64
import io
import tempfile
from functools import lru_cache
from pathlib import Path

import numpy as np
from PIL import ImageSequence
from scipy.io import wavfile

from flowgrpo.training.reports import video_files
from rewards.files import films, media, suffixes

LARGEST_SIDE = 384  # pixels of an embedded picture or video
LONGEST = 15  # seconds of embedded sound
HIGHEST_RATE = 24000  # samples per second of it
BARS = 72  # of a sound's outline


def data_url(path: Path) -> str:
    """A picture as WebP, a film as MP4, at most `LARGEST_SIDE` wide and high, or the beginning of a sound as WAV.

    It is kept for the next page: a run writes one at every evaluation, of files that stay as they are.
    """
    return _data_url(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=4096)
def _data_url(path: Path, changed: int) -> str:
    suffix = suffixes.suffix_of(path)
    if suffix in suffixes.SOUNDS:
        kind, data = "audio/wav", _sound(path)
    elif suffix in suffixes.FILMS:
        kind, data = "video/mp4", _film(path)
    else:
        kind, data = "image/webp", _picture(path)
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def outline(path: Path) -> str | None:
    """The peaks of a sound as an SVG path of upright bars, each in 3 x 40 units; None of anything else."""
    if suffixes.suffix_of(path) not in suffixes.SOUNDS:
        return None
    _, samples = _read(path)
    peaks = [part.max(initial=0) for part in np.array_split(np.abs(samples).max(1), BARS)]
    heights = [max(0.5, 18 * float(min(peak, 1))) for peak in peaks]
    return "".join(f"M{3 * i + 1.5} {20 - h:.1f}V{20 + h:.1f}" for i, h in enumerate(heights))


def pixel_difference(before: Path, after: Path) -> float | None:
    """The mean absolute difference of two pictures, in [0, 1]; the second is scaled to the first's size.

    Of moving pictures the first frames count. None where one of the files is a film, a sound or a text.
    """
    if {suffixes.suffix_of(before), suffixes.suffix_of(after)} & {*suffixes.FILMS, *suffixes.SOUNDS, *suffixes.TEXTS}:
        return None
    first, second = media.picture(before), media.picture(after)
    second = second.resize(first.size)
    return float(np.abs(np.asarray(first, np.float64) - np.asarray(second, np.float64)).mean() / 255)


def _picture(path: Path) -> bytes:
    frames, durations = [], []
    with media.opened(path) as image:
        if image.format == "WEBP" and getattr(image, "n_frames", 1) > 1 and max(image.size) <= LARGEST_SIDE:
            return path.read_bytes()
        for frame in media.bounded(path, ImageSequence.Iterator(image)):
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
    """An MP4 as it is; another film, or one that is too large, as a small MP4."""
    program, is_mp4 = video_files.ffmpeg(), suffixes.suffix_of(path) == ".mp4"
    if is_mp4 and program is None:
        return path.read_bytes()
    fits = max(media.film(path)[0].size) <= LARGEST_SIDE
    if is_mp4 and fits:
        return path.read_bytes()
    assert program is not None  # or `media.film` had said so
    sides = f"'min(iw,{LARGEST_SIDE})':'min(ih,{LARGEST_SIDE})'"
    colours = "out_color_matrix=bt709:out_range=tv"  # as `video_files.run` says that they are
    scale = f"scale={sides}:force_original_aspect_ratio=decrease:force_divisible_by=2:{colours}"
    with path.open("rb") as opened, tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "small.mp4"
        source = ["-protocol_whitelist", "file", "-f", films.container_of(opened), "-i", str(path.absolute())]
        try:
            video_files.run(program, [*source, "-an", "-vf", scale], file)
        except OSError as error:
            raise media.MediaError(f"{path} cannot be shown ({error})") from error
        return file.read_bytes()


def _sound(path: Path) -> bytes:
    rate, samples = _read(path)
    if rate > HIGHEST_RATE:
        from scipy.signal import resample_poly  # here, for its import takes a second, and few pages have sounds

        samples, rate = resample_poly(samples, HIGHEST_RATE, rate), HIGHEST_RATE
    buffer = io.BytesIO()
    wavfile.write(buffer, rate, (samples.clip(-1, 1) * 32767).round().astype(np.int16))
    return buffer.getvalue()


def _read(path: Path) -> tuple[int, np.ndarray]:
    """The rate and the beginning of a .wav file, float32 (N, C) in [-1, 1]."""
    rate, samples = media.sound(path)
    samples = samples[: LONGEST * rate]
    scale = np.iinfo(samples.dtype).max if np.issubdtype(samples.dtype, np.integer) else 1
    return rate, (samples.astype(np.float32) / scale).reshape(len(samples), -1)
