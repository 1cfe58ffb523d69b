"""Pictures, videos and sounds in files, which may be anyone's: what cannot be read as one is one sentence.

Only regular files are opened, for a FIFO would be waited for; only by the decoders named in `FORMATS`, for an EPS file would
start another program; and never more of them than the bounds below, for a small file may unpack to any size. `films.py`
decodes videos.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image, ImageOps, ImageSequence, TiffImagePlugin, UnidentifiedImageError

from rewards.files import films, suffixes

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", *(["AVIF"] if ".avif" in suffixes.PICTURES else []))
LARGEST_FILE = 256 << 20  # bytes
LARGEST_PICTURE = 1 << 25  # pixels, a frame of 8K
LARGEST_VIDEO = 1 << 28  # pixels of all its frames
MOST_FRAMES = 1 << 12
HIGHEST_RATE = 384_000  # samples of a sound per second
UNSIGNED = 1  # sample format of a TIFF
GREY_16 = ((16,), 1)  # bits and photometric interpretation of a TIFF of one channel, black to white
WORDS = 160  # characters of what a decoder says


class MediaError(ValueError):
    """A file cannot be read as what it should be. The message is one sentence that names it."""


def picture(path: str | Path) -> Image.Image:
    """An RGB picture, turned as its camera says; of a moving one the first frame.

    Raises:
        MediaError: it cannot be read.
    """
    with opened(path) as image:
        return rgb(image)


def frames(path: str | Path) -> list[Image.Image]:
    """The RGB frames of a moving picture, one of a still one.

    Raises:
        MediaError: it cannot be read, or its frames are too many.
    """
    with opened(path) as image:
        return [rgb(frame) for frame in bounded(path, ImageSequence.Iterator(image))]


def film(path: str | Path) -> list[Image.Image]:
    """The RGB frames of a .mp4, .mov or .webm file; a .webm that was cut off has those that are whole.

    Raises:
        MediaError: it cannot be read, its frames are too many, or ffmpeg is not installed.
    """
    with _regular(path) as file, closing(films.decode(file, LARGEST_PICTURE)) as frames:
        return list(bounded(path, frames))


def sound(path: str | Path) -> tuple[int, np.ndarray]:
    """The rate of a .wav file and its samples as they are, (N,) of one channel or (N, C).

    Raises:
        MediaError: it cannot be read, has no samples, or some that are not numbers.
    """
    from scipy.io import wavfile

    with _regular(path) as file:
        rate, samples = wavfile.read(file)
        if not samples.size:
            raise MediaError(f"{path} cannot be read (it holds no samples)")
        if not 0 < rate <= HIGHEST_RATE:
            raise MediaError(f"{path} cannot be read ({rate} samples per second are not between 1 and {HIGHEST_RATE})")
        if not np.isfinite(samples).all():
            raise MediaError(f"{path} cannot be read (some of its samples are not finite)")
        return rate, samples


@contextmanager
def opened(path: str | Path) -> Iterator[Image.Image]:
    """A picture whose size is known and whose pixels are not read yet; whatever happens inside is one sentence.

    Raises:
        MediaError: it cannot be read, or is too large.
    """
    with _regular(path) as file, Image.open(file, formats=FORMATS) as image:
        _check_size(path, *image.size)
        if isinstance(image, TiffImagePlugin.TiffImageFile):
            _check_tiff(path, image)
        yield image


def bounded(path: str | Path, frames: Iterable[Image.Image]) -> Iterator[Image.Image]:
    """The same frames, as long as they are few enough.

    Raises:
        MediaError: there are too many, or no frame at all, or one has another size than the first.
    """
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
    """A picture in RGB, turned as its camera says.

    Of 16 bits a pixel the upper ones count: PIL's own conversion shows all above 255 as white.
    """
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):
        deep = np.asarray(image).clip(0, 65535).astype(np.uint32)
        image = Image.fromarray(((deep + 128) // 257).astype(np.uint8))
    return image.convert("RGB")


@contextmanager
def _regular(path: str | Path) -> Iterator[BinaryIO]:
    """A regular file, opened; whatever is raised inside is one sentence, for decoders of foreign bytes raise anything."""
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
        raise MediaError(f"{path} needs a package to be read: {_words(error)}") from error
    except Exception as error:
        raise MediaError(f"{path} cannot be read ({_words(error)})") from error


def _opener(path: str, flags: int) -> int:
    """The open file; `O_NONBLOCK` because opening a FIFO would wait for a writer."""
    handle = os.open(path, flags | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise MediaError(f"{path} is not a regular file")
    return handle


def _check_size(path: str | Path, width: int, height: int) -> None:
    if width * height > LARGEST_PICTURE:
        raise MediaError(f"{path} has {width} x {height} pixels, at most {LARGEST_PICTURE} are read")


def _check_tiff(path: str | Path, image: TiffImagePlugin.TiffImageFile) -> None:
    """Refuse a TIFF with tiles above the bound, for one is decoded whole, with an unknown white, or of several pages."""
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


def _words(error: Exception) -> str:
    return " ".join(str(error).split())[:WORDS] or type(error).__name__
