"""Files of others: each is read as what it is, or refused in one sentence that names it."""

import os
import select
import socket
import struct
import subprocess
import threading
import wave
import zlib
from pathlib import Path

import numpy as np
import pytest
from imageio_ffmpeg import get_ffmpeg_exe
from PIL import Image

from rewards.files import media, suffixes

FILM = Path(__file__).parents[2] / "data" / "film.mp4"


@pytest.mark.parametrize(("colours", "channels"), [(0, 1), (2, 3), (4, 2), (6, 4)])  # grey, RGB, and both with opacity
def test_of_16_bits_the_upper_ones_are_seen(tmp_path, colours, channels):
    values = (0, 100, 514, 32768, 65535)
    opaque = [65535] * (channels in (2, 4))
    pixels = [[value] * (channels - len(opaque)) + opaque for value in values]
    (tmp_path / "deep.png").write_bytes(a_png(5, 1, b"\0" + np.array(pixels, ">u2").tobytes(), 16, colours))
    picture = media.picture(tmp_path / "deep.png")
    assert (picture.mode, np.asarray(picture)[0].tolist()) == ("RGB", [[v] * 3 for v in (0, 0, 2, 128, 255)])


def test_pictures_of_other_modes_are_as_ever_and_grey_of_16_bits_is_rounded(tmp_path):
    deep = (("I;16", level, (seen,) * 3) for level, seen in ((128, 0), (129, 1), (257, 1)))  # 0.498, 0.502 and 1 of 255
    flat = ("L", 7, (7, 7, 7)), ("1", 1, (255,) * 3), ("RGBA", (9, 8, 7, 0), (9, 8, 7))
    for mode, colour, seen in (*flat, *deep):
        Image.new(mode, (2, 2), colour).save(tmp_path / "a.png")
        assert media.picture(tmp_path / "a.png").getpixel((0, 0)) == seen


def test_pixels_are_a_picture_or_all_frames(tmp_path):
    shades = [Image.new("RGB", (4, 2), (51 * i, 255, 0)) for i in range(3)]
    for suffix in (".gif", ".webp", ".jpg"):  # a .jpg of two cameras (MPO) is its first picture
        kind = {"format": "MPO"} if suffix == ".jpg" else {"lossless": True}
        shades[0].save(tmp_path / f"a{suffix}", save_all=True, append_images=shades[1:], **kind)
    for suffix in (".gif", ".webp"):
        pixels = media.pixels(tmp_path / f"a{suffix}")
        assert (pixels.shape, pixels.dtype) == ((3, 3, 2, 4), np.float32)
        assert pixels[:, :, 0, 0] == pytest.approx(np.array([[0.2 * i, 1, 0] for i in range(3)]))
    assert media.pixels(tmp_path / "a.jpg").shape == (3, 2, 4)
    assert media.pixels(FILM).shape == (len(media.film(FILM)), 3, *media.film(FILM)[0].size[::-1])


@pytest.mark.parametrize("kind", ["EPS", "PPM", "PDF", "ICO", "TGA"])
def test_other_formats_are_refused_whatever_their_name(tmp_path, monkeypatch, kind):
    """An EPS would start Ghostscript."""
    monkeypatch.setattr("subprocess.Popen", lambda *a, **k: pytest.fail("another program was started"))
    Image.new("RGB", (32, 32)).save(tmp_path / "a.png", kind)
    with pytest.raises(media.MediaError, match=r"a\.png cannot be read \(it is not PNG, JPEG, WEBP, BMP, GIF.*\)"):
        media.picture(tmp_path / "a.png")


@pytest.mark.skipif(".avif" not in suffixes.PICTURES, reason="this Pillow reads no AVIF")
def test_an_avif_is_its_frames(tmp_path):
    shades = [Image.new("RGB", (8, 6), (60 * i, 200, 30)) for i in range(3)]
    shades[0].save(tmp_path / "a.avif", save_all=True, append_images=shades[1:], quality=100)
    seen = np.stack([np.asarray(frame) for frame in media.frames(tmp_path / "a.avif")]).astype(int)
    assert seen.shape == (3, 6, 8, 3)
    assert abs(seen - np.stack([np.asarray(shade) for shade in shades])).max() < 6
    assert np.asarray(media.picture(tmp_path / "a.avif")).tolist() == seen[0].tolist()


@pytest.mark.parametrize("kind", ["png", "webp", "jpeg", "tiff"])
def test_every_frame_is_turned_as_its_camera_says(tmp_path, kind):
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter to the right
    shades = [Image.new("RGB", (16, 8), (0, 80 * i, 0)) for i in range(3 if kind in ("png", "webp") else 1)]
    for shade in shades:
        shade.paste((200, 60, 30), (0, 0, 8, 8))  # the left half, which is then the upper one
    moving = {"save_all": True, "append_images": shades[1:]} if len(shades) > 1 else {}
    shades[0].save(tmp_path / f"a.{kind}", exif=exif, quality=100, lossless=True, **moving)
    frames = media.frames(tmp_path / f"a.{kind}")
    assert len(frames) == len(shades)
    for i, frame in enumerate([*frames, media.picture(tmp_path / f"a.{kind}")]):
        assert frame.size == (8, 16)
        assert np.allclose(frame.getpixel((4, 4)), (200, 60, 30), atol=3)
        assert np.allclose(frame.getpixel((4, 12)), (0, 80 * (i % len(shades)), 0), atol=3)


@pytest.mark.parametrize(("place", "value"), [(1, 9), (3, 9), (5, 9)])  # of the second frame: left, top, width
@pytest.mark.filterwarnings("ignore")
def test_frames_of_several_sizes_are_refused(tmp_path, place, value):
    shades = [Image.fromarray(np.random.default_rng(i).integers(0, 256, (6, 6, 3), np.uint8)) for i in range(2)]
    shades[0].save(tmp_path / "a.gif", save_all=True, append_images=shades[1:])
    data = bytearray(tmp_path.joinpath("a.gif").read_bytes())
    second = data.rindex(struct.pack("<HHHH", 0, 0, 6, 6)) - 1
    data[second + place : second + place + 2] = struct.pack("<H", value)
    (tmp_path / "a.gif").write_bytes(data)
    assert media.picture(tmp_path / "a.gif").size == (6, 6)
    with pytest.raises(media.MediaError, match=r"a\.gif cannot be read \(its frames have several sizes\)$"):
        media.frames(tmp_path / "a.gif")


SPECIAL = {
    "FIFO": os.mkfifo,
    "folder": os.mkdir,
    "device": lambda name: os.symlink("/dev/zero", name),
    "socket": lambda name: socket.socket(socket.AF_UNIX).bind(name),
}


@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize("read", [media.picture, media.frames, media.sound, media.film])
def test_only_regular_files_are_opened(tmp_path, monkeypatch, kind, read):
    monkeypatch.chdir(tmp_path)  # names of sockets are short
    SPECIAL[kind]("a.png")
    said = []

    def asked():
        with pytest.raises(media.MediaError, match=r"^a\.png (is not a regular file|cannot be read \(.+\))$") as error:
            read("a.png")
        said.append(error)

    thread = threading.Thread(target=asked, daemon=True)
    thread.start()
    thread.join(5)
    assert said  # nobody waits for a writer


def a_png(width, height, rows=b"", depth=8, colours=2):
    """A PNG whose header promises so many pixels."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, depth, colours, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def test_memory_is_bounded_by_what_a_header_promises(tmp_path, monkeypatch):
    (tmp_path / "a.png").write_bytes(a_png(8192, 4097))
    with pytest.raises(media.MediaError, match="a.png has 8192 x 4097 pixels, at most 33554432 are read"):
        media.picture(tmp_path / "a.png")
    (tmp_path / "b.png").write_bytes(a_png(60000, 60000))  # above what PIL itself lets pass
    with pytest.raises(media.MediaError, match="b.png cannot be read"):
        media.picture(tmp_path / "b.png")
    monkeypatch.setattr(media, "LARGEST_FILE", 20)
    with pytest.raises(media.MediaError, match="a.png has 65 bytes, at most 20 are read"):
        media.picture(tmp_path / "a.png")


@pytest.mark.parametrize(("name", "bound"), [("MOST_FRAMES", 2), ("LARGEST_VIDEO", 4 * 4 * 2)])
@pytest.mark.parametrize("kind", ["gif", "webp", "png"])
def test_frames_are_bounded(tmp_path, monkeypatch, name, bound, kind):
    shades = [Image.new("RGB", (4, 4), (80 * i, 0, 0)) for i in range(3)]
    shades[0].save(tmp_path / f"a.{kind}", save_all=True, append_images=shades[1:], lossless=True)
    assert [frame.size for frame in media.frames(tmp_path / f"a.{kind}")] == [(4, 4)] * 3
    monkeypatch.setattr(media, name, bound)
    with pytest.raises(media.MediaError, match="has more than"):
        media.frames(tmp_path / f"a.{kind}")


def a_film(path, frames=3, *options):
    """A video file of 32 x 16 pixels."""
    source = ["-f", "lavfi", "-i", f"testsrc=s=32x16:r=8:d={frames / 8}", "-pix_fmt", "yuv420p"]
    subprocess.run([get_ffmpeg_exe(), "-v", "error", *source, *options, str(path)], check=True)
    return path


@pytest.mark.parametrize("kind", ["mp4", "mov", "webm"])
def test_a_film_is_its_frames(tmp_path, kind):
    red = ["-vf", "drawbox=c=red:t=fill"]
    frames = media.film(a_film(tmp_path / f"A.{kind.upper()}", 3, *red))
    assert [(frame.mode, frame.size) for frame in frames] == [("RGB", (32, 16))] * 3
    low, high = np.asarray(frames).min((0, 1, 2)), np.asarray(frames).max((0, 1, 2))
    assert low[0] > 240
    assert max(high[1:]) < 15


@pytest.mark.parametrize(("name", "bound", "said"), [
    ("MOST_FRAMES", 2, "has more than 2 frames"), ("LARGEST_VIDEO", 32 * 16 * 3 - 1, "or 1535 pixels in all of them"),
    ("LARGEST_PICTURE", 32 * 16 - 1, r"cannot be read \(Picture size 32x16 exceeds specified max pixel count 511"),
    ("LARGEST_FILE", 20, "bytes, at most 20 are read"),
])  # fmt: skip
def test_films_are_bounded(tmp_path, monkeypatch, name, bound, said):
    path = a_film(tmp_path / "a.mp4")
    assert len(media.film(path)) == 3
    monkeypatch.setattr(media, name, bound)
    with pytest.raises(media.MediaError, match=f"a.mp4 .*{said}"):
        media.film(path)


@pytest.mark.parametrize("where", [[], ["-movflags", "faststart"]])  # what a player looks for first: at the end, or not
def test_a_film_that_was_cut_off_is_one_sentence(tmp_path, where):
    path = a_film(tmp_path / "a.mp4", 8, *where)
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 7 // 8])
    with pytest.raises(media.MediaError, match=r"^.*a\.mp4 cannot be read \(.+\)$"):
        media.film(path)


PLAYLIST = "#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n{}\n#EXT-X-ENDLIST\n"


@pytest.mark.parametrize("kind", ["mp4", "mov", "webm"])
@pytest.mark.parametrize("text", [
    "no film\n", "", "<svg/>", "#EXTM3U\nfile:///dev/zero\n", "ffconcat version 1.0\nfile /etc/passwd\n",
    "ffconcat version 1.0\nfile whole.mp4\n", "ffconcat version 1.0\nfile http://127.0.0.1:{port}/a.mp4\n",
    PLAYLIST.format("whole.mp4"), PLAYLIST.format("http://127.0.0.1:{port}/a.mp4"),
    '<MPD xmlns="urn:mpeg:dash:schema:mpd:2011"><BaseURL>http://127.0.0.1:{port}/</BaseURL></MPD>',
])  # fmt: skip
def test_a_playlist_is_no_film_and_nothing_in_it_is_followed(tmp_path, kind, text):
    (tmp_path / "whole.mp4").write_bytes(FILM.read_bytes())
    with socket.create_server(("127.0.0.1", 0)) as listening:
        (tmp_path / f"a.{kind}").write_text(text.format(port=listening.getsockname()[1]))
        with pytest.raises(media.MediaError, match=rf"a\.{kind} cannot be read \(it is not MP4, MOV or WebM\)$"):
            media.film(tmp_path / f"a.{kind}")
        assert select.select([listening], [], [], 0)[0] == []  # nobody has called


def test_a_film_s_name_is_no_address_and_no_option(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("concat:b.mp4", "-y.mp4", "%d.mp4", "http:a.mp4"):
        Path(name).write_bytes(FILM.read_bytes())
        assert media.film(name)


def broken(data, number):
    """Copies of a file with a tail cut off, or with some bytes replaced."""
    random = np.random.default_rng(0)
    for _ in range(number):
        changed = bytearray(data[: random.integers(1, len(data) + 1)] if random.random() < 0.3 else data)
        for place in random.integers(0, len(changed), random.integers(1, 8)):
            changed[place] = random.integers(256)
        yield bytes(changed)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["png", "jpeg", "webp", "bmp", "gif", "wav", "mp4"])
def test_a_broken_file_is_read_or_one_sentence(tmp_path, kind):
    whole, path = tmp_path / f"whole.{kind}", tmp_path / f"a.{kind}"
    if kind == "wav":
        with wave.open(str(whole), "wb") as file:
            file.setparams((2, 2, 8000, 0, "NONE", ""))
            file.writeframes(bytes(range(200)))
    elif kind == "mp4":
        a_film(whole)
    else:
        pixels = np.random.default_rng(0).integers(0, 256, (2, 12, 12, 3), dtype=np.uint8)
        first, second = map(Image.fromarray, pixels)
        first.save(whole, **({"save_all": True, "append_images": [second]} if kind in ("gif", "webp") else {}))
    said = []
    for data in broken(whole.read_bytes(), 20 if kind == "mp4" else 60):
        path.write_bytes(data)
        try:
            {"wav": media.sound, "mp4": media.film}.get(kind, media.frames)(path)
        except media.MediaError as error:
            said.append(str(error))
    assert len(said) > 5
    assert all(
        str(path) in sentence and "\n" not in sentence and len(sentence) < len(str(path)) + 200 for sentence in said
    )


@pytest.mark.parametrize(("rate", "samples", "said"), [
    (8000, [], "it holds no samples"), (0, [0.5], "0 samples per second are not between"),
    (4_000_000_007, [0.5], "4000000007 samples per second are not between"),
    (8000, [0.5, float("nan")], "some of its samples are not finite"),
])  # fmt: skip
def test_sounds_that_nobody_can_hear_are_refused(tmp_path, rate, samples, said):
    data = np.array(samples, "<f4").tobytes()
    form = struct.pack("<HHIIHH", 3, 1, rate, min(rate * 4, 2**32 - 1), 4, 32)
    body = b"WAVEfmt " + struct.pack("<I", len(form)) + form + b"data" + struct.pack("<I", len(data)) + data
    (tmp_path / "a.wav").write_bytes(b"RIFF" + struct.pack("<I", len(body)) + body)
    with pytest.raises(media.MediaError, match=f"a.wav cannot be read .*{said}"):
        media.sound(tmp_path / "a.wav")
