"""What a page embeds of a picture or a film: what browsers show, small enough."""

import re
import subprocess

import numpy as np
import pytest
import torch
from data_urls import embedded
from film_files import H264, HEVC, VP9, blocks, write_film
from PIL import Image

from flowgrpo.commands.page_parts.media import data_url
from flowgrpo.training.reports import video_files
from flowgrpo.training.reports.samples import save_sample
from rewards.files.media import MediaError, film


def test_a_large_webp_is_made_smaller_and_keeps_its_pace(tmp_path, monkeypatch):
    monkeypatch.setattr(video_files, "ffmpeg", lambda: None)
    kind, data = embedded(data_url(save_sample(torch.rand(3, 3, 200, 768), tmp_path / "a")))
    with Image.open(data) as video:
        assert (kind, video.size, video.n_frames, video.info["loop"]) == ("image/webp", (384, 100), 3, 0)
        video.seek(2)
        video.load()
        assert video.info["duration"] == 125


def test_a_large_mp4_is_made_smaller_and_keeps_its_pace(tmp_path):
    kind, data = embedded(data_url(save_sample(torch.rand(6, 3, 200, 768), tmp_path / "a", frame_rate=24)))
    (tmp_path / "small.mp4").write_bytes(data.getvalue())
    assert kind == "video/mp4"
    assert [frame.size for frame in film(tmp_path / "small.mp4")] == [(384, 100)] * 6
    assert media_length(tmp_path / "small.mp4") == pytest.approx(6 / 24)


@pytest.mark.parametrize(
    ("name", "codec"), [("a.webm", VP9), ("a.mov", ("prores_ks",)), ("A.MOV", H264), ("B.MP4", HEVC)]
)
def test_any_film_is_one_that_browsers_play(tmp_path, name, codec):
    """An MP4 that is small stays as it is."""
    frames = blocks(frames=3)
    kind, data = embedded(data_url(write_film(tmp_path / name, frames, "yuv422p10le", *codec)))
    (tmp_path / "small.mp4").write_bytes(data.getvalue())
    assert kind == "video/mp4"
    seen = np.stack([np.asarray(frame) for frame in film(tmp_path / "small.mp4")]).astype(int)
    assert abs(seen - frames)[:, 8::16, 8::16].max() < 12
    assert media_length(tmp_path / "small.mp4") == pytest.approx(3 / 8, abs=0.01)
    assert (data.getvalue() == (tmp_path / name).read_bytes()) == (name == "B.MP4")


@pytest.mark.parametrize("size", [(1, 1), (1, 5), (7, 1)])
def test_a_film_too_small_for_browsers_is_one_sentence(tmp_path, size):
    write_film(tmp_path / "a.mov", np.zeros((2, *size, 3), np.uint8), "rgb24", "png")
    with pytest.raises(MediaError, match=r"a\.mov cannot be shown \(ffmpeg could not write [^\n]*\)$"):
        data_url(tmp_path / "a.mov")


@pytest.mark.parametrize("name", ["a.gif", "a.png", "a.tiff", "a.jfif"])
def test_any_picture_is_one_that_browsers_show(tmp_path, name):
    shades = [Image.new("RGB", (8, 6), (60 * i, 200, 30)) for i in range(1 if name > "a.j" and name != "a.png" else 3)]
    form = {"a.jfif": "JPEG"}.get(name, name[2:].upper())
    moving = {"save_all": True, "append_images": shades[1:]} if len(shades) > 1 else {}
    shades[0].save(tmp_path / name, form, **moving)
    kind, data = embedded(data_url(tmp_path / name))
    with Image.open(data) as shown:
        assert (kind, shown.format, shown.size, shown.n_frames) == ("image/webp", "WEBP", (8, 6), len(shades))


def media_length(file):
    """Seconds of a video, as ffmpeg counts them."""
    done = subprocess.run([video_files.ffmpeg(), "-i", str(file)], capture_output=True, text=True, check=False)
    return float(re.search(r"Duration: 00:00:(\d+\.\d+)", done.stderr)[1])
