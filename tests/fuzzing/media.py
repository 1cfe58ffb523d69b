"""Broken pictures, videos and sounds, through what reads them: score, the files of prompts, the gallery.

A case is the suffix of a file and its bytes. Tiny files of many formats and pixel types, written here or by ffmpeg, are cut
off, have bytes flipped, put in and taken out, get the head of another format, and headers that promise any size.
"""

import io
import json
import struct
import tempfile
import warnings
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
from hypothesis import strategies as st
from PIL import Image
from scipy.io import wavfile

from flowgrpo.commands.inspect.gallery import write_gallery
from flowgrpo.commands.scores import score as scoring
from flowgrpo.data import conditions, prompts
from flowgrpo.errors import InputError
from fuzzing.runner import Summary, is_sentence, run
from rewards import RewardError
from rewards.files import media, suffixes
from rewards.models import similarity

DATA = Path(__file__).parents[1] / "data"
READ = tuple(suffixes.MEDIA | suffixes.TEXTS)
SUFFIXES = (*READ, ".heic", ".txt")
MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "I;16", "I", "F")
MOVING = ("GIF", "WEBP", "PNG", "TIFF", "AVIF")  # formats of several frames or pages
SOUNDS = ("u1", "<i2", "<i4", "<f4", "<f8")
LARGE = (0, 1, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF)


@cache
def pictures() -> dict[str, bytes]:
    """Make pictures of 6 x 5 pixels, still and moving, in every format that takes their mode, and packed TIFFs."""
    found = {}
    pixels = np.random.default_rng(0).integers(0, 256, (3, 5, 6, 3), dtype=np.uint8)
    for mode in MODES:
        first, *others = (Image.fromarray(frame).convert("L" if mode == "I;16" else mode) for frame in pixels)
        if mode == "I;16":
            first = Image.fromarray(pixels[0, :, :, 0].astype(np.uint16) * 257)
        for form in media.FORMATS:
            for several in ({}, {"save_all": True, "append_images": others}) if form in MOVING else ({},):
                buffer = io.BytesIO()
                try:
                    first.save(buffer, form, **several)
                except (OSError, ValueError, KeyError):  # the format has no such pixels
                    continue
                found[f"{form} {mode} {len(several)}"] = buffer.getvalue()
    for packed in ("tiff_lzw", "tiff_adobe_deflate", "jpeg", "packbits"):
        buffer = io.BytesIO()
        Image.fromarray(pixels[0]).save(buffer, "TIFF", compression=packed)
        found[f"TIFF {packed}"] = buffer.getvalue()
    return found


@cache
def sounds() -> dict[str, bytes]:
    """Make sounds of 20 samples in every type, with one channel and two."""
    found = {}
    for kind in SOUNDS:
        for shape in ((20,), (20, 2)):
            buffer = io.BytesIO()
            wavfile.write(buffer, 8000, np.arange(np.prod(shape)).reshape(shape).astype(kind))
            found[f"WAV {kind} {shape}"] = buffer.getvalue()
    return found


@cache
def seeds() -> dict[str, bytes]:
    """Return all files that cases begin with; nothing should read the last ones.

    ffmpeg made the films, of two frames: 8 and 10 bits, turned, with opacity, HDR.
    """
    array = io.BytesIO()
    np.save(array, np.zeros((4, 4, 3), np.float32))
    files = [DATA / "film.mp4", DATA / "film.webm", *sorted((DATA / "films").iterdir())]
    films = {f"{file.suffix[1:].upper()} {file.stem}": file.read_bytes() for file in files}
    text = json.dumps({"text": "7", "tokens": ["7"]}).encode()
    script = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\nshowpage\n"
    drawing = b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>'
    playlist = b"#EXTM3U\n#EXTINF:1,\nfile:///dev/zero\n"
    others = {"NPY": array.getvalue(), "JSON": text, "EPS": script, "SVG": drawing, "M3U": playlist, "nothing": b""}
    return {**pictures(), **sounds(), **films, **others}


def mended(data: bytes) -> bytes:
    """Correct the checksums of a PNG's chunks, so that readers look at what was changed."""
    at, found = 8, data[:8]
    while at + 12 <= len(data):
        (size,) = struct.unpack(">I", data[at : at + 4])
        chunk = data[at + 4 : at + 8 + size]
        found += struct.pack(">I", size) + chunk + struct.pack(">I", zlib.crc32(chunk))
        at += 12 + size
    return found


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, bytes]:
    """Draw a suffix, mostly the right one, and the bytes of a file with a few changes."""
    name = draw(st.sampled_from(sorted(seeds())))
    data = bytearray(seeds()[name])
    own = f".{name.split()[0].lower()}"
    suffix = draw(st.sampled_from((own if own in READ else ".png",) * 30 + SUFFIXES))
    for _ in range(draw(st.integers(0, 4))):
        at = len(data) - draw(st.integers(0, len(data)))  # simple cases have a good head
        match draw(st.sampled_from(("flip", "flip", "size", "size", "cut", "insert", "remove", "head"))):
            case "flip" if at < len(data):
                data[at] ^= draw(st.integers(1, 255))
            case "size":
                form = draw(st.sampled_from("<>")) + draw(st.sampled_from("HI"))
                value = draw(st.sampled_from(LARGE))
                data[at : at + struct.calcsize(form)] = struct.pack(form, value & (256 ** struct.calcsize(form) - 1))
            case "cut":
                del data[at:]
            case "insert":
                data[at:at] = draw(st.binary(min_size=1, max_size=8)) * draw(st.sampled_from((1, 1, 1, 200)))
            case "remove":
                del data[at : at + draw(st.integers(1, 12))]
            case "head":
                other = seeds()[draw(st.sampled_from(sorted(seeds())))]
                data[: min(16, at)] = other[: min(16, at)]
    if data.startswith(b"\x89PNG") and draw(st.sampled_from((True, True, False))):
        return suffix, mended(bytes(data))
    return suffix, bytes(data)


def readers(file: Path) -> dict[str, Callable[[], object]]:
    """Return everything that reads such a file; each accepts or refuses it by itself."""
    folder = file.parent
    row = {"file": file.name, "prompt": "a", "image": file.name, "seed": 0, "step": 0, "rewards": {"shapes": 0.5}}
    (folder / "manifest.jsonl").write_text(json.dumps(row) + "\n")

    def named() -> None:
        """Score it by its name alone, beside a companion of macOS."""
        (folder / "alone").mkdir()
        (folder / "alone" / f"._{file.name}").write_bytes(b"\0\5\x16\7")
        (folder / "alone" / file.name).write_bytes(file.read_bytes())
        for found in scoring.list_files(folder / "alone"):
            scoring.read(folder / "alone" / found.name)

    def conditioned() -> None:
        columns = [prompt.columns for prompt in prompts.load(str(folder / "manifest.jsonl"))]
        conditions.check(columns, ["image"], "prompts.train")
        conditions.load_file(columns[0]["image"])

    return {
        "score": lambda: scoring.read(folder / scoring.list_files(folder)[0].name),
        "names": named,
        "prompts": conditioned,
        "gallery": lambda: write_gallery([folder], folder / "gallery.html"),
        "reference": lambda: similarity._read(str(file)),
    }


def attempt(case: tuple[str, bytes]) -> str | None:
    """Let everything read a case; return None if all accept it, else the first refusal."""
    suffix, data = case
    said = []
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # decoders warn of what they mend
        file = Path(folder) / f"a{suffix}"
        file.write_bytes(data)
        for read in readers(file).values():
            try:
                read()
            except (InputError, RewardError) as error:
                sentence = str(error)
                assert is_sentence(sentence), f"no short sentence of one line: {sentence!r}"
                assert file.name in sentence, f"the file is not named: {sentence!r}"
                said.append(sentence)
    return said[0] if said else None


def fuzz(seed: int, count: int) -> Summary:
    return run("media", cases(), attempt, seed, count)
