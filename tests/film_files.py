"""Films of a few frames that the bundled ffmpeg encodes."""

import subprocess

import numpy as np
from imageio_ffmpeg import get_ffmpeg_exe

HEVC = ("libx265", "-crf", "4", "-x265-params", "log-level=none", "-tag:v", "hvc1")
H264 = ("libx264", "-crf", "4")
VP9 = ("libvpx-vp9", "-crf", "4", "-b:v", "0", "-cpu-used", "8")
AV1 = ("libaom-av1", "-crf", "4", "-cpu-used", "8")


def blocks(height=48, width=64, frames=2, side=16):
    """Frames (F, H, W, 3) of blocks of random colours, as a checkerboard with soft and sharp edges."""
    random = np.random.default_rng(0)
    colours = random.integers(30, 226, (frames, -(-height // side), -(-width // side), 3), dtype=np.uint8)
    return colours.repeat(side, 1).repeat(side, 2)[:, :height, :width]


def ffmpeg(*arguments, given=None):
    subprocess.run([get_ffmpeg_exe(), "-v", "error", "-y", *map(str, arguments)], input=given, check=True)


def write_film(path, frames, pixel_format, *codec, filters=(), options=()):
    """Encode frames, uint8 (F, H, W, 3), at eight a second, and return the path.

    `codec` is its name and options; `filters` come after the pixel format; `options` are of the output.
    """
    _, height, width, _ = frames.shape
    source = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}", "-r", "8", "-i", "pipe:0"]
    chain = ",".join([f"format={pixel_format}", *filters])
    ffmpeg(*source, "-vf", chain, "-c:v", *codec, *options, path, given=np.ascontiguousarray(frames).tobytes())
    return path
