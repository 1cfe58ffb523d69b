"""Videos as files: what ffmpeg says of them, and what is read back."""

import re
import subprocess

import numpy as np
import pytest
import torch

from flowgrpo.data.prompts import Row
from flowgrpo.training.reports import video_files
from flowgrpo.training.reports.samples import Sample, SampleFolder, save_sample
from rewards.files import media


def described(file):
    """What ffmpeg says of a file's video."""
    done = subprocess.run([video_files.ffmpeg(), "-i", str(file)], capture_output=True, text=True, check=False)
    return re.search(r"Stream #0:0.*: (Video: .*)", done.stderr)[1]


def levels(*values, size=(16, 24)):
    return torch.tensor(values).view(-1, 1, 1, 1).expand(-1, 3, *size)


def test_a_video_is_an_mp4_that_browsers_play_at_its_rate(tmp_path):
    values = [0.2, 0.6, 0.4, 1.0]
    file = save_sample(levels(*values), tmp_path / "a", frame_rate=24)
    assert file == tmp_path / "a.mp4"
    said = described(file)
    assert said.startswith("Video: h264")
    assert all(words in said for words in ("yuv420p(tv, bt709", " 24x16", " 24 fps"))
    data = file.read_bytes()
    assert data.index(b"moov") < data.index(b"mdat")  # the index before the pictures: it plays while it loads
    frames = media.film(file)
    assert len(frames) == 4
    for frame, value in zip(frames, values, strict=True):
        assert np.asarray(frame).mean() == pytest.approx(255 * value, abs=3)


def test_colours_are_what_they_were(tmp_path):
    video = torch.zeros(3, 3, 32, 32)
    video[:, 0], video[:, 1], video[:, 2] = 0.8, 0.3, 0.1
    [colour] = {tuple(np.asarray(frame)[16, 16]) for frame in media.film(save_sample(video, tmp_path / "a"))}
    assert colour == pytest.approx((204, 76, 26), abs=4)


def test_the_same_video_is_the_same_file(tmp_path):
    video = torch.rand(5, 3, 32, 32)
    one, other = (save_sample(video, tmp_path / name).read_bytes() for name in ("a", "b"))
    assert one == other


def test_odd_sides_get_a_line_more(tmp_path):
    assert [frame.size for frame in media.film(save_sample(levels(0.5, size=(15, 17)), tmp_path / "a"))] == [(18, 16)]


def test_a_runs_folder_keeps_its_videos_rate(tmp_path):
    folder = SampleFolder(tmp_path)
    folder.frame_rate = 16.0
    folder.write([Sample(0, Row("a", 0), {}, levels(0.1, 0.9))], step=2)
    assert " 16 fps" in described(tmp_path / "samples/step-000002/0000.mp4")


def test_what_ffmpeg_cannot_write_is_said(tmp_path):
    with pytest.raises(OSError, match=r"ffmpeg could not write a\.mp4 \("):
        video_files.write_mp4(video_files.ffmpeg(), np.zeros((2, 16, 16, 3), np.uint8), tmp_path / "none" / "a.mp4", 8)
