"""Decode the frames and the sound of an open MP4, MOV or WebM file with ffmpeg.

ffmpeg is told the container and gets the open file alone. If it guessed the container it would also read an SVG or follow a
playlist to other files and over the network.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Generator
from typing import IO, BinaryIO

from PIL import Image

EBML = b"\x1a\x45\xdf\xa3"  # first bytes of WebM and Matroska
BOXES = (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip")  # type of the first box of an MP4 or MOV
HDR = ("smpte2084", "arib-std-b67")  # transfer functions PQ and HLG
QUIET = ["-hide_banner", "-v", "level+info", "-nostats", "-xerror", "-nostdin"]
LARGEST_LOG = 1 << 20  # bytes of ffmpeg's log that are read
# Frames of more bits are rounded to 8 bits before the conversion to RGB. In one step, 10-bit 4:2:0 would be upsampled by
# another interpolation than 8-bit 4:2:0, and colours at edges would differ by up to 60 levels.
EIGHT_BITS = (
    "yuv410p|yuv411p|yuv420p|yuv422p|yuv440p|yuv444p|gray|gbrp"
    "|yuvj420p|yuvj422p|yuvj440p|yuvj444p"  # full range, as ffmpeg 7 decodes them
)


def decode(file: BinaryIO, largest: int) -> Generator[Image.Image, None, None]:
    """Yield each stored RGB frame once as a player shows it: rotated, cropped, scaled to square pixels, without opacity.

    Raises:
        ValueError: ffmpeg cannot decode the file, a frame has more than `largest` pixels, or the film is HDR (needs tone
            mapping).
        ImportError: imageio-ffmpeg is not installed.
    """
    command = _command(detect_container(file), largest)
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen(command, stdin=file, stdout=subprocess.PIPE, stderr=log) as ffmpeg,
    ):
        try:
            stream = ffmpeg.stdout
            assert stream is not None  # a pipe
            for number, frame in enumerate(iter(lambda: _read_frame(stream, largest), None)):
                if not number:
                    _check_colours(_read_log(log))
                yield frame
            if status := ffmpeg.wait():
                raise ValueError(_first_error(_read_log(log)) or f"ffmpeg ended with status {status}")
        finally:
            ffmpeg.kill()  # the caller may stop early


def decode_sound(file: BinaryIO, target: str, largest: int) -> None:
    """Write the sound of a film to the file `target`, a .wav of 16 bits.

    Raises:
        ValueError: the film has no sound, or one of more than `largest` bytes, or ffmpeg cannot decode it.
        ImportError: imageio-ffmpeg is not installed.
    """
    program, source = _source(detect_container(file))
    stream = ["-map", "0:a:0", "-c:a", "pcm_s16le", "-fs", str(largest), "-f", "wav", "-y", target]
    command = [program, *QUIET, *source, *stream]
    with tempfile.TemporaryFile() as log:
        if status := subprocess.run(command, stdin=file, stderr=log, check=False).returncode:
            raise ValueError(_first_error(_read_log(log), "sound") or f"ffmpeg ended with status {status}")
    if os.path.getsize(target) >= largest:
        raise ValueError(f"its sound has more than {largest} bytes")


def detect_container(file: BinaryIO) -> str:
    """Return ffmpeg's name of an open film's container; raise ValueError if it is not MP4, MOV or WebM."""
    head = os.pread(file.fileno(), 8, 0)
    if head.startswith(EBML):
        return "matroska"
    if head[4:] in BOXES:
        return "mov"
    raise ValueError("it is not MP4, MOV or WebM")


def _command(container: str, largest: int) -> list[str]:
    """Return the command that writes each frame as an 8-bit PPM: magic, size, largest value, pixels."""
    program, source = _source(container)
    bounds = ["-max_pixels", str(largest), "-threads", "1"]  # each thread holds frames
    stream = ["-map", "0:V:0", "-fps_mode", "passthrough"]  # V: no cover picture
    # Clip stretched frames to just above the bound. Ignore up to 1 % of stretch, which resizing programs leave.
    width = f"if(gt(abs(sar-1),0.01),clip(round(iw*sar),1,{largest}/ih+1),iw)"
    filters = f"format={EIGHT_BITS},scale=w='{width}':h=ih,format=rgb24"
    target = ["-vf", filters, "-c:v", "ppm", "-f", "image2pipe", "pipe:1"]
    return [program, *QUIET, *bounds, *source, *stream, *target]


def _source(container: str) -> tuple[str, list[str]]:
    """Return the path of ffmpeg, and the arguments that read its standard input."""
    try:
        from imageio_ffmpeg import get_ffmpeg_exe
    except ModuleNotFoundError:
        raise ImportError("pip install 'flowgrpo[video]'") from None
    return get_ffmpeg_exe(), ["-protocol_whitelist", "fd", "-f", container, "-fd", "0", "-i", "fd:"]


def _read_frame(stream: IO[bytes], largest: int) -> Image.Image | None:
    """Return the next frame, or None if the stream ends, even within a frame."""
    magic, size, depth = (stream.readline(64) for _ in range(3))
    if not depth:
        return None
    if (magic, depth) != (b"P6\n", b"255\n"):
        raise ValueError("ffmpeg wrote frames of another format than it was asked for")
    width, height = map(int, size.split())
    if width * height > largest:
        raise ValueError(f"stretched to square pixels it has {width} x {height}, at most {largest} are read")
    pixels = stream.read(3 * width * height)
    return Image.frombytes("RGB", (width, height), pixels) if len(pixels) == 3 * width * height else None


def _read_log(log: BinaryIO) -> str:
    """Return the beginning of ffmpeg's log without moving the position of the file."""
    return os.pread(log.fileno(), LARGEST_LOG, 0).decode(errors="replace")


def _check_colours(log: str) -> None:
    """Raise ValueError if the log line about the output names an HDR transfer function."""
    colours = re.search(r"Video: ppm, rgb24\((.*?)\)", log)
    if colours is None:
        raise ValueError("ffmpeg does not say which colours it has")
    for transfer in HDR:
        if transfer in colours[1]:
            raise ValueError(f"it is HDR ({transfer}), whose frames need a tone mapping; convert it to SDR")


def _first_error(log: str, stream: str = "video stream") -> str:
    """Return the first error of ffmpeg's log without the component that precedes it; `stream` is what was asked for."""
    match = re.search(r"\[(?:error|fatal|panic)\] (.*)", log)
    words = match[1] if match else ""
    return f"it has no {stream}" if words.startswith("Stream map") else words
