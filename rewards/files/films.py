"""Films: frames that ffmpeg decodes from an open MP4, MOV or WebM file.

ffmpeg is told which container the file is, for left to guess it would read whatever it knows, an SVG for one. It gets the
open file and nothing else: it would follow a playlist, whatever its name, to other files and over the network.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Generator
from typing import IO, BinaryIO

from PIL import Image

EBML = b"\x1a\x45\xdf\xa3"  # how WebM and Matroska begin
BOXES = (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip")  # of which one begins an MP4 or MOV, after its size
HDR = ("smpte2084", "arib-std-b67")  # transfer functions PQ and HLG
LARGEST_LOG = 1 << 20  # bytes of ffmpeg's log that are searched
# Deep frames are rounded to 8 bits in their own colour sampling before they become RGB. In one step, 4:2:0 of 10 bits
# would get its colours by another interpolation than 4:2:0 of 8 bits, and those at edges would differ by up to 60 levels.
EIGHT_BITS = (
    "yuv410p|yuv411p|yuv420p|yuv422p|yuv440p|yuv444p|gray|gbrp"
    "|yuvj420p|yuvj422p|yuvj440p|yuvj444p"  # of full range, as ffmpeg 7 decodes them
)


def decode(file: BinaryIO, largest: int) -> Generator[Image.Image, None, None]:
    """Yield the RGB frames of a film as a player shows them: turned, cropped, stretched to square pixels.

    Every stored frame comes once, however long it is shown. Opacity is left out.

    Args:
        largest: pixels that a frame may have.

    Raises:
        ValueError: ffmpeg cannot decode it, a frame is too large, or its colours are of HDR, which need a tone mapping.
        ImportError: imageio-ffmpeg is not installed.
    """
    command = _command(container_of(file), largest)
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
            ffmpeg.kill()  # the reader may have had enough


def container_of(file: BinaryIO) -> str:
    """Return what ffmpeg calls the container of an open film, whose position stays: ffmpeg begins where it stands.

    Raises:
        ValueError: it is no container that is read.
    """
    head = os.pread(file.fileno(), 8, 0)
    if head.startswith(EBML):
        return "matroska"
    if head[4:] in BOXES:
        return "mov"
    raise ValueError("it is not MP4, MOV or WebM")


def _command(container: str, largest: int) -> list[str]:
    """Return the command that writes each frame as a PPM of 8 bits: magic, size, largest value, pixels."""
    try:
        from imageio_ffmpeg import get_ffmpeg_exe
    except ModuleNotFoundError:
        raise ImportError("pip install 'flowgrpo[video]'") from None
    log = ["-hide_banner", "-v", "level+info", "-nostats"]
    bounds = ["-max_pixels", str(largest), "-threads", "1"]  # each thread holds frames
    source = ["-protocol_whitelist", "fd", "-f", container, "-fd", "0", "-i", "fd:"]
    stream = ["-map", "0:V:0", "-fps_mode", "passthrough"]  # V: no picture of a cover
    # Frames that would be stretched beyond the bound are made just too large. One per cent is left as it is: programs
    # that change a film's size leave such a rest.
    width = f"if(gt(abs(sar-1),0.01),clip(round(iw*sar),1,{largest}/ih+1),iw)"
    filters = f"format={EIGHT_BITS},scale=w='{width}':h=ih,format=rgb24"
    target = ["-vf", filters, "-c:v", "ppm", "-f", "image2pipe", "pipe:1"]
    return [get_ffmpeg_exe(), *log, "-xerror", "-nostdin", *bounds, *source, *stream, *target]


def _read_frame(stream: IO[bytes], largest: int) -> Image.Image | None:
    """Return the next frame; None where the stream ends, in the middle of a frame too."""
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
    """Return the beginning of what ffmpeg said so far; its own position in the file stays."""
    return os.pread(log.fileno(), LARGEST_LOG, 0).decode(errors="replace")


def _check_colours(log: str) -> None:
    """Refuse HDR, by the line on the output that ffmpeg writes before the first frame."""
    colours = re.search(r"Video: ppm, rgb24\((.*?)\)", log)
    if colours is None:
        raise ValueError("ffmpeg does not say which colours it has")
    for transfer in HDR:
        if transfer in colours[1]:
            raise ValueError(f"it is HDR ({transfer}), whose frames need a tone mapping; convert it to SDR")


def _first_error(log: str) -> str:
    """Return the first error of ffmpeg's log, without the part of ffmpeg that names itself before it."""
    found = re.search(r"\[(?:error|fatal|panic)\] (.*)", log)
    words = found[1] if found else ""
    return "it has no video stream" if words.startswith("Stream map") else words
