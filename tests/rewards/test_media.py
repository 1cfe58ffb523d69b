"""Files of others: each is read as what it is, or refused in one sentence that names it."""

import os
import socket
import struct
import threading
import wave
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from rewards import media


def test_of_16_bits_the_upper_ones_are_seen(tmp_path):
    values = np.array([[0, 128, 129, 257, 32768, 65535]], dtype=np.uint16)
    Image.fromarray(values).save(tmp_path / "deep.png")
    picture = media.picture(tmp_path / "deep.png")
    # value / 257, rounded: 0, 0.498, 0.502, 1, 127.502, 255
    assert (picture.mode, np.asarray(picture)[0].tolist()) == ("RGB", [[v] * 3 for v in (0, 0, 1, 1, 128, 255)])


def test_pictures_of_other_modes_are_as_ever(tmp_path):
    for mode, colour, seen in (("L", 7, (7, 7, 7)), ("1", 1, (255,) * 3), ("RGBA", (9, 8, 7, 0), (9, 8, 7))):
        Image.new(mode, (2, 2), colour).save(tmp_path / "a.png")
        assert media.picture(tmp_path / "a.png").getpixel((0, 0)) == seen


@pytest.mark.parametrize("kind", ["TIFF", "EPS", "PPM", "PDF", "ICO"])
def test_other_formats_are_refused_whatever_their_name(tmp_path, monkeypatch, kind):
    """A float TIFF was read as black, and an EPS would start Ghostscript."""
    monkeypatch.setattr("subprocess.Popen", lambda *a, **k: pytest.fail("another program was started"))
    picture = Image.fromarray(np.full((32, 32), 0.5, np.float32)) if kind == "TIFF" else Image.new("RGB", (32, 32))
    picture.save(tmp_path / "a.png", kind)
    with pytest.raises(media.MediaError, match=r"a\.png cannot be read \(it is no PNG, JPEG, WEBP, BMP or GIF\)"):
        media.picture(tmp_path / "a.png")


def special(path, kind):
    """A file that is no regular one."""
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(path))


@pytest.mark.parametrize("kind", ["FIFO", "folder", "device", "socket"])
@pytest.mark.parametrize("read", [media.picture, media.frames, media.sound, media.film])
def test_only_regular_files_are_opened(tmp_path, monkeypatch, kind, read):
    monkeypatch.chdir(tmp_path)  # names of sockets are short
    special(tmp_path / "a.png", kind)
    said = []

    def asked():
        with pytest.raises(media.MediaError, match=r"^a\.png (is not a regular file|cannot be read \(.+\))$") as error:
            read("a.png")
        said.append(error)

    thread = threading.Thread(target=asked, daemon=True)
    thread.start()
    thread.join(5)
    assert said  # nobody waits for a writer


def a_png(width, height):
    """A PNG whose header promises so many pixels."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


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


def broken(data, seed):
    """Copies of a file with a tail cut off, or with some bytes replaced."""
    random = np.random.default_rng(seed)
    for _ in range(60):
        changed = bytearray(data[: random.integers(1, len(data) + 1)] if random.random() < 0.3 else data)
        for place in random.integers(0, len(changed), random.integers(1, 8)):
            changed[place] = random.integers(256)
        yield bytes(changed)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["png", "jpeg", "webp", "bmp", "gif", "wav"])
def test_a_broken_file_is_read_or_one_sentence(tmp_path, kind):
    whole, path = tmp_path / f"whole.{kind}", tmp_path / f"a.{kind}"
    if kind == "wav":
        with wave.open(str(whole), "wb") as file:
            file.setparams((2, 2, 8000, 0, "NONE", ""))
            file.writeframes(bytes(range(200)))
    else:
        pixels = np.random.default_rng(0).integers(0, 256, (2, 12, 12, 3), dtype=np.uint8)
        first, second = map(Image.fromarray, pixels)
        first.save(whole, **({"save_all": True, "append_images": [second]} if kind in ("gif", "webp") else {}))
    said = []
    for data in broken(whole.read_bytes(), seed=0):
        path.write_bytes(data)
        try:
            media.sound(path) if kind == "wav" else media.frames(path)
        except media.MediaError as error:
            said.append(str(error))
    assert len(said) > 5
    assert all(str(path) in sentence and "\n" not in sentence for sentence in said)


@pytest.mark.parametrize(
    ("rate", "samples", "said"),
    [
        (8000, [], "it holds no samples"),
        (0, [0.5], "0 samples per second are not between"),
        (4_000_000_007, [0.5], "4000000007 samples per second are not between"),
        (8000, [0.5, float("nan")], "some of its samples are not finite"),
    ],
)
def test_sounds_that_nobody_can_hear_are_refused(tmp_path, rate, samples, said):
    data = np.array(samples, "<f4").tobytes()
    form = struct.pack("<HHIIHH", 3, 1, rate, min(rate * 4, 2**32 - 1), 4, 32)
    body = b"WAVEfmt " + struct.pack("<I", len(form)) + form + b"data" + struct.pack("<I", len(data)) + data
    (tmp_path / "a.wav").write_bytes(b"RIFF" + struct.pack("<I", len(body)) + body)
    with pytest.raises(media.MediaError, match=f"a.wav cannot be read .*{said}"):
        media.sound(tmp_path / "a.wav")


DATA = Path(__file__).parents[1] / "data"


def test_no_frames_are_no_film():
    with pytest.raises(media.MediaError, match=r"^a\.mp4 cannot be read \(it holds no frames\)$"):
        list(media.bounded("a.mp4", []))


@pytest.mark.parametrize(
    "data", [b"#EXTM3U\nfile:///dev/zero\n", b"ffconcat version 1.0\nfile /etc/passwd\n", b"<svg/>", b""]
)
def test_only_films_are_given_to_ffmpeg(tmp_path, data):
    (tmp_path / "a.mp4").write_bytes(data)
    with pytest.raises(media.MediaError, match=r"a\.mp4 cannot be read \(it is no MP4, MOV or WebM\)$"):
        media.film(tmp_path / "a.mp4")


@pytest.mark.parametrize("kind", ["mp4", "webm"])
def test_a_film_is_its_frames(kind, monkeypatch):
    pytest.importorskip("imageio_ffmpeg")
    path = DATA / f"film.{kind}"
    assert [frame.size for frame in media.film(path)] == [(16, 16)] * 2
    monkeypatch.setattr(media, "LARGEST_PICTURE", 255)
    with pytest.raises(media.MediaError, match=f"{kind} has 16 x 16 pixels, at most 255 are read"):
        media.film(path)


def test_what_ffmpeg_prints_is_left_out(tmp_path):
    pytest.importorskip("imageio_ffmpeg")
    (tmp_path / "a.mp4").write_bytes((DATA / "film.mp4").read_bytes()[:40])
    with pytest.raises(media.MediaError, match=r"a\.mp4 cannot be read \(Could not load meta information\)$"):
        media.film(tmp_path / "a.mp4")
