"""Films of every pixel format: each is read as a player shows it, or refused in one sentence that names it."""

import os
import re
import stat

import numpy as np
import pytest
from film_files import AV1, H264, HEVC, VP9, blocks, ffmpeg, write_film

from rewards.files import media

SHARP = blocks()
WHOLE = ("-use_editlist", "0")  # by its list, ffmpeg 7 cuts the last frame off
# Names, pixel formats, and codecs with their options; the last column is the 8-bit format of the same colour sampling.
FFV1, PNG = ("ffv1", "-f", "matroska"), ("png",)
DEEP = [
    ("a.mp4", "yuv420p10le", H264, "yuv420p"), ("a.mp4", "yuv422p10le", H264, "yuv422p"),
    ("a.mp4", "yuv444p10le", H264, "yuv444p"), ("a.mp4", "gray10le", H264, "gray"),
    ("a.mp4", "yuv420p10le", HEVC, "yuv420p"), ("a.mp4", "yuv420p12le", HEVC, "yuv420p"),
    ("a.mp4", "yuv422p12le", HEVC, "yuv422p"), ("a.mp4", "gray12le", HEVC, "gray"),
    ("a.webm", "yuv420p10le", VP9, "yuv420p"), ("a.webm", "yuv440p12le", VP9, "yuv440p"),
    ("a.webm", "gbrp", VP9, "gbrp"), ("a.webm", "yuv420p10le", AV1, "yuv420p"),
    ("a.mov", "yuv422p10le", ("prores_ks", "-q:v", "1"), "yuv422p"),
    ("a.mov", "yuva444p10le", ("prores_ks", "-profile:v", "4", "-q:v", "1"), "yuv444p"),
    ("a.mov", "gbrp12le", ("cfhd", "-quality", "film3+"), "gbrp"), ("a.mov", "yuv422p10le", ("v210",), "yuv422p"),
    ("a.mov", "gbrp10le", ("r210",), "gbrp"), ("a.mov", "rgb48be", PNG, "gbrp"),
    ("a.mov", "argb", ("qtrle",), "gbrp"), ("a.mov", "rgba64be", PNG, "gbrp"),
    ("a.webm", "yuv420p16le", FFV1, "yuv420p"), ("a.webm", "yuva422p10le", FFV1, "yuv422p"),
    ("a.webm", "gray16le", FFV1, "gray"), ("a.webm", "ya8", FFV1, "gray"),
]  # fmt: skip
PLAIN = [*{case[-1]: case for case in reversed(DEEP)}.values()]  # the first of each sampling
PLAIN += [case for case in DEEP if case[1] in ("yuva444p10le", "argb", "ya8")]  # with opacity


def in_zoo(*case):
    return pytest.param(*case, marks=pytest.mark.zoo)


def pixels(path):
    return np.stack([np.asarray(frame) for frame in media.film(path)]).astype(int)


@pytest.mark.parametrize(
    ("name", "deep", "codec", "eight"),
    [case if case in PLAIN else in_zoo(*case) for case in DEEP],
    ids=[f"{c[0]} {d}" for _, d, c, _ in DEEP],
)
def test_a_film_of_any_pixel_format_is_its_copy_of_8_bits(tmp_path, name, deep, codec, eight):
    seen = pixels(write_film(tmp_path / name, SHARP, deep, *codec))
    lossless = FFV1 if eight == "yuv440p" else ("libx264rgb" if eight == "gbrp" else "libx264", "-qp", "0")
    copied = "rgb24" if eight == "gbrp" else eight
    copy = pixels(write_film(tmp_path / "copy.mp4", SHARP, copied, *lossless))
    assert seen.shape == copy.shape == SHARP.shape
    assert abs(seen - copy).mean() < 1.5
    assert abs(seen - copy).max() < 20
    middles = seen[:, 8::16, 8::16], SHARP[:, 8::16, 8::16].astype(int)
    if eight == "gray":
        luma = middles[1] @ (0.299, 0.587, 0.114)  # ITU-R BT.601
        middles = middles[0], np.stack([luma] * 3, -1)
    assert abs(middles[0] - middles[1]).max() < 6


@pytest.mark.parametrize("range_", ["tv", "pc"])
@pytest.mark.parametrize("matrix", ["bt601", "bt709"])
@pytest.mark.parametrize(("name", "pixel_format", "codec"), [
    ("a.mp4", "yuv420p", H264), in_zoo("a.mp4", "yuv420p10le", H264), in_zoo("a.mp4", "yuv422p10le", HEVC),
    ("a.webm", "yuv444p12le", VP9),
])  # fmt: skip
def test_a_film_s_range_and_matrix_are_those_it_says(tmp_path, range_, matrix, name, pixel_format, codec):
    colours = [[0, 0, 0], [255, 255, 255], [128, 128, 128], [200, 60, 30]]
    frames = np.uint8(colours)[None, None].repeat(2, 0).repeat(16, 1).repeat(16, 2)
    space = {"bt601": "smpte170m", "bt709": "bt709"}[matrix]
    converted = [f"scale=out_range={range_}:out_color_matrix={matrix}", f"format={pixel_format}"]
    tagged = f"setparams=range={range_}:colorspace={space}"
    path = write_film(tmp_path / name, frames, "rgb24", *codec, filters=[*converted, tagged])
    assert abs(pixels(path)[:, 8, 8::16] - colours).max() < 6


@pytest.mark.parametrize("turns", [1, 2, 3])
@pytest.mark.parametrize(("name", "pixel_format", "codec"), [
    ("a.mp4", "yuv420p", H264), in_zoo("a.mp4", "yuv420p10le", HEVC), in_zoo("a.mov", "yuv422p10le", ("prores_ks",)),
])  # fmt: skip
def test_a_film_is_turned_as_its_camera_says(tmp_path, name, pixel_format, codec, turns):
    upright = write_film(tmp_path / f"upright-{name}", SHARP, pixel_format, *codec)
    ffmpeg("-display_rotation", 90 * turns, "-i", upright, "-c", "copy", tmp_path / name)
    seen = pixels(tmp_path / name)
    turned = np.rot90(SHARP, turns, (1, 2))
    assert seen.shape == turned.shape
    assert abs(seen - turned)[:, 8::16, 8::16].max() < 6


@pytest.mark.parametrize("size", [(33, 47), (1, 1), (17, 1), (1, 64)])
@pytest.mark.parametrize(("name", "pixel_format", "codec"), [
    ("a.webm", "yuv420p10le", ("ffv1", "-slices", "1", "-f", "matroska")), in_zoo("a.mov", "rgb24", ("png",)),
    in_zoo("a.webm", "yuv420p10le", VP9),
])  # fmt: skip
def test_a_film_may_have_odd_sides(tmp_path, name, pixel_format, codec, size):
    colour, (width, height) = (200, 60, 30), size
    source = f"color=0x{bytes(colour).hex()}:s=64x64:r=8:d=0.25"
    cropped = f"format={pixel_format},crop={width}:{height}:0:0:exact=1"
    ffmpeg("-f", "lavfi", "-i", source, "-vf", cropped, "-c:v", *codec, tmp_path / name)
    seen = pixels(tmp_path / name)
    assert seen.shape == (2, height, width, 3)
    assert abs(seen - colour).max() < 6


@pytest.mark.parametrize(
    ("name", "codec"), [("a.mp4", (*H264, *WHOLE)), ("a.webm", VP9), ("a.mov", ("prores_ks", *WHOLE))]
)
def test_every_frame_of_a_film_of_variable_rate_comes_once(tmp_path, name, codec):
    """At a constant rate, as ffmpeg writes them by itself, they would be 29 to 67 frames."""
    frames = blocks(frames=8)
    timing = {"filters": ["setpts=(N*N+N)/8/TB"], "options": ["-fps_mode", "passthrough"]}
    seen = pixels(write_film(tmp_path / name, frames, "yuv422p10le", *codec, **timing))
    assert seen.shape == frames.shape
    assert abs(seen - frames)[:, 8::16, 8::16].max() < 9


def test_the_picture_of_a_cover_is_no_film(tmp_path):
    film = write_film(tmp_path / "film.mp4", SHARP, "yuv420p10le", *H264)
    ffmpeg("-f", "lavfi", "-i", "color=red:s=20x20:d=1", "-frames:v", "1", tmp_path / "cover.png")
    covered = ["-c", "copy", "-disposition:v:0", "attached_pic"]
    ffmpeg("-i", tmp_path / "cover.png", "-i", film, "-map", 0, "-map", 1, *covered, tmp_path / "a.mp4")
    assert pixels(tmp_path / "a.mp4").tolist() == pixels(film).tolist()
    ffmpeg("-i", tmp_path / "cover.png", *covered, tmp_path / "b.mp4")
    with pytest.raises(media.MediaError, match=r"b\.mp4 cannot be read \(it has no video stream\)$"):
        media.film(tmp_path / "b.mp4")


@pytest.mark.parametrize(
    ("aspect", "width"), [("2/1", 128), ("1/2", 32), ("16/15", 68), ("1280/1281", 64), ("1/20", 3)]
)
def test_a_film_has_square_pixels(tmp_path, aspect, width):
    path = write_film(tmp_path / "a.mov", SHARP, "yuv422p10le", "prores_ks", filters=[f"setsar={aspect}"])
    assert {frame.size for frame in media.film(path)} == {(width, 48)}


def test_a_film_that_is_stretched_beyond_the_bound_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(media, "LARGEST_PICTURE", 64 * 48 * 2)
    path = write_film(tmp_path / "a.mp4", SHARP, "yuv420p", *H264, filters=["setsar=2"])
    assert media.film(path)[0].size == (128, 48)
    path = write_film(tmp_path / "b.mp4", SHARP, "yuv420p", *H264, filters=["setsar=20"])
    with pytest.raises(media.MediaError, match=r"b\.mp4 cannot be read \(stretched to square pixels it has 129 x 48"):
        media.film(path)


@pytest.mark.parametrize("transfer", ["smpte2084", "arib-std-b67"])
@pytest.mark.parametrize(
    ("name", "codec"), [("a.mp4", HEVC), in_zoo("a.mp4", H264), ("a.mov", ("prores_ks",)), in_zoo("a.webm", VP9)]
)
def test_hdr_is_refused(tmp_path, name, codec, transfer):
    """Shown as if it were SDR it is pale or dark, and no reward would say so."""
    tagged = f"setparams=color_trc={transfer}:color_primaries=bt2020:colorspace=bt2020nc"
    path = write_film(tmp_path / name, SHARP, "yuv422p10le", *codec, filters=[tagged])
    said = rf"{re.escape(name)} cannot be read \(it is HDR \({transfer}\), .* convert it to SDR\)$"
    with pytest.raises(media.MediaError, match=said):
        media.film(path)


@pytest.mark.parametrize(
    ("size", "pixel_format"), [((48, 64), "yuv420p10le"), ((24, 32), "yuv420p"), ((96, 128), "yuv444p")]
)
def test_a_film_that_changes_has_frames_of_its_first_size(tmp_path, size, pixel_format):
    write_film(tmp_path / "a.webm", SHARP, "yuv420p", *VP9)
    write_film(tmp_path / "b.webm", blocks(*size, side=size[0] // 3), pixel_format, *VP9)
    (tmp_path / "both.txt").write_text("file a.webm\nfile b.webm\n")
    ffmpeg("-f", "concat", "-i", tmp_path / "both.txt", "-c", "copy", tmp_path / "both.webm")
    seen = pixels(tmp_path / "both.webm")
    assert abs(seen - np.concatenate([SHARP, SHARP]))[:, 8::16, 8::16].max() < 9


@pytest.mark.parametrize(("script", "said"), [
    ("kill -9 $$", r"ffmpeg ended with status -9"), ("exit 3", r"ffmpeg ended with status 3"),
    ("echo '[error] no such thing' >&2; exit 1", r"no such thing"),
    (r"printf 'P6\n2 2\n65535\n000000000000000000000000'", r"ffmpeg wrote frames of another format than .*"),
    (r"printf 'GIF89a and other things\n\n\n\n'", r"ffmpeg wrote frames of another format than .*"),
    (r"printf 'P6\n1 1\n255\nabc'", r"ffmpeg does not say which colours it has"),
    (r"printf 'P6\n1 1\n255\nab'", r"it holds no frames"), (r"printf 'P6\n1 1\n'", r"it holds no frames"),
])  # fmt: skip
def test_a_decoder_that_writes_what_was_not_asked_is_one_sentence(tmp_path, monkeypatch, script, said):
    program = tmp_path / "ffmpeg"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setitem(os.environ, "IMAGEIO_FFMPEG_EXE", str(program))
    (tmp_path / "a.mp4").write_bytes(b"\0\0\0\x20ftypisom")
    with pytest.raises(media.MediaError, match=rf"a\.mp4 cannot be read \({said}\)$"):
        media.film(tmp_path / "a.mp4")
