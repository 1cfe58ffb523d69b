"""Read untrusted pictures, videos and sounds. Any failure is a MediaError whose message is one sentence.

Only regular files are opened, since opening a FIFO waits for a writer. Only the decoders in `FORMATS` are used, since an
EPS file would start another program. Sizes are bounded, since a small file may unpack to any size.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import IO, BinaryIO

import numpy as np
from PIL import Image, ImageOps, ImageSequence, TiffImagePlugin, UnidentifiedImageError

from rewards.files import films, suffixes

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", *(["AVIF"] if ".avif" in suffixes.PICTURES else []))
LARGEST_FILE = 256 << 20  # bytes
LARGEST_PICTURE = 1 << 25  # pixels, a frame of 8K
LARGEST_VIDEO = 1 << 28  # pixels of all frames together
MOST_FRAMES = 1 << 12
HIGHEST_RATE = 384_000  # samples of a sound per second
UNSIGNED = 1  # sample format of a TIFF
GREY_16 = ((16,), 1)  # bits and photometric interpretation of a TIFF, one channel from black to white
LONGEST_REASON = 160  # characters of a decoder's message


class MediaError(ValueError):
    """A file cannot be read. The message is one sentence that names it."""


def picture(path: str | Path) -> Image.Image:
    """Return an RGB picture, rotated by its EXIF orientation; the first frame of an animation."""
    with open_picture(path) as image:
        return rgb(image)


def pixels(path: str | Path) -> np.ndarray:
    """Return a picture (3, H, W), or the frames of an animation or a film (F, 3, H, W), float32 in [0, 1]."""
    stack = np.stack([np.asarray(frame) for frame in frames(path)]).transpose(0, 3, 1, 2).astype(np.float32) / 255
    return stack if len(stack) > 1 else stack[0]


def frames(path: str | Path) -> list[Image.Image]:
    """Return the RGB frames of an animation or a film, or the one frame of a still picture."""
    suffix = suffixes.suffix_of(path)
    if suffix in suffixes.FILMS:
        return film(path)
    if suffix not in (*suffixes.ANIMATIONS, *suffixes.MULTI_FRAME):
        return [picture(path)]
    with open_picture(path) as image:
        return [rgb(frame) for frame in check_frames(path, ImageSequence.Iterator(image))]


def film(path: str | Path) -> list[Image.Image]:
    """Return the RGB frames of a .mp4, .mov or .webm file; a truncated .webm gives its complete frames."""
    with _open_regular(path) as file, closing(films.decode(file, LARGEST_PICTURE)) as frames:
        return list(check_frames(path, frames))


def sound(path: str | Path) -> tuple[int, np.ndarray]:
    """Return the sampling rate of a .wav file or of a film's sound, and its raw samples, (N,) for one channel or (N, C)."""
    with _open_regular(path) as file:
        if suffixes.suffix_of(path) not in suffixes.FILMS:
            return _wav(file)
        with tempfile.NamedTemporaryFile() as heard:
            films.decode_sound(file, heard.name, LARGEST_FILE)
            return _wav(heard)


def _wav(file: IO[bytes]) -> tuple[int, np.ndarray]:
    from scipy.io import wavfile

    rate, samples = wavfile.read(file)
    if not samples.size:
        raise ValueError("it holds no samples")
    if not 0 < rate <= HIGHEST_RATE:
        raise ValueError(f"{rate} samples per second are not between 1 and {HIGHEST_RATE}")
    if not np.isfinite(samples).all():
        raise ValueError("some of its samples are not finite")
    return rate, samples


@contextmanager
def open_picture(path: str | Path) -> Iterator[Image.Image]:
    """Open a picture, check its size, and yield it before its pixels are decoded."""
    with _open_regular(path) as file, Image.open(file, formats=FORMATS) as image:
        _check_size(path, *image.size)
        if isinstance(image, TiffImagePlugin.TiffImageFile):
            _check_tiff(path, image)
        yield image


def check_frames(path: str | Path, frames: Iterable[Image.Image]) -> Iterator[Image.Image]:
    """Yield the frames; fail if there are too many or none, or if their sizes differ."""
    pixels = number = 0
    sizes = set()
    for number, frame in enumerate(frames, start=1):
        sizes.add(frame.size)
        if len(sizes) > 1:
            raise MediaError(f"{path} cannot be read (its frames have several sizes)")
        pixels += frame.width * frame.height
        if number > MOST_FRAMES or pixels > LARGEST_VIDEO:
            raise MediaError(f"{path} has more than {MOST_FRAMES} frames or {LARGEST_VIDEO} pixels in all of them")
        yield frame
    if not number:
        raise MediaError(f"{path} cannot be read (it holds no frames)")


def rgb(image: Image.Image) -> Image.Image:
    """Convert a picture to RGB, rotated by its EXIF orientation.

    16-bit values are divided by 257; PIL's own conversion clips all above 255 to white.
    """
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):
        deep = np.asarray(image).clip(0, 65535).astype(np.uint32)
        image = Image.fromarray(((deep + 128) // 257).astype(np.uint8))
    return image.convert("RGB")


@contextmanager
def _open_regular(path: str | Path) -> Iterator[BinaryIO]:
    """Open a regular file, and turn any exception inside the `with` into a MediaError."""
    try:
        with open(path, "rb", opener=_opener) as file:
            size = os.fstat(file.fileno()).st_size
            if size > LARGEST_FILE:
                raise MediaError(f"{path} has {size} bytes, at most {LARGEST_FILE} are read")
            yield file
    except MediaError:
        raise
    except FileNotFoundError:
        raise MediaError(f"there is no file {path}") from None
    except UnidentifiedImageError:
        raise MediaError(f"{path} cannot be read (it is not {', '.join(FORMATS[:-1])} or {FORMATS[-1]})") from None
    except ImportError as error:
        raise MediaError(f"{path} needs a package to be read: {_describe(error)}") from error
    except Exception as error:
        raise MediaError(f"{path} cannot be read ({_describe(error)})") from error


def _opener(path: str, flags: int) -> int:
    """Open without blocking (a FIFO would wait for a writer) and refuse all but regular files."""
    handle = os.open(path, flags | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise MediaError(f"{path} is not a regular file")
    return handle


def _check_size(path: str | Path, width: int, height: int) -> None:
    if width * height > LARGEST_PICTURE:
        raise MediaError(f"{path} has {width} x {height} pixels, at most {LARGEST_PICTURE} are read")


def _check_tiff(path: str | Path, image: TiffImagePlugin.TiffImageFile) -> None:
    """Refuse a TIFF with too large tiles (each is decoded whole), with an unknown white level, or with several pages."""
    tags = image.tag_v2
    _check_size(path, tags.get(TiffImagePlugin.TILEWIDTH, 0), tags.get(TiffImagePlugin.TILELENGTH, 0))
    depths, formats = tags.get(TiffImagePlugin.BITSPERSAMPLE, (1,)), tags.get(TiffImagePlugin.SAMPLEFORMAT, (UNSIGNED,))
    deep = (depths, tags.get(TiffImagePlugin.PHOTOMETRIC_INTERPRETATION)) if image.mode.startswith("I;") else GREY_16
    if set(formats) != {UNSIGNED} or max(depths) > 16 or deep != GREY_16:
        raise ValueError("which of its values is white is not known; save it with 8 or 16 bits from black to white")
    try:
        image.seek(1)
    except EOFError:
        return
    raise ValueError("it has several pages; save the one that is meant as a file of its own")


def _describe(error: Exception) -> str:
    return " ".join(str(error).split())[:LONGEST_REASON] or type(error).__name__
