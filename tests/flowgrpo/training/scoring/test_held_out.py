import json
import wave

import numpy as np
import pytest
import torch
from PIL import Image

from flowgrpo.data.prompts import Row
from flowgrpo.errors import InputError
from flowgrpo.training.reports import video_files
from flowgrpo.training.reports.samples import Sample, SampleFolder, save_sample
from flowgrpo.training.run.run_files import read_manifest


def test_an_image_is_a_png_of_its_very_pixels(tmp_path):
    values = torch.arange(3 * 4 * 5).view(3, 4, 5)
    file = save_sample(values / 255, tmp_path / "guidance-1.5")
    assert file == tmp_path / "guidance-1.5.png"
    assert np.array_equal(np.asarray(Image.open(file)), values.permute(1, 2, 0).numpy())


def test_without_ffmpeg_a_video_is_an_endless_webp_of_its_frames(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(video_files, "ffmpeg", lambda: None)
    video_files.say_once_that_there_is_no_ffmpeg.cache_clear()
    levels = [0.2, 0.6, 0.4, 1.0]
    video = torch.tensor(levels).view(4, 1, 1, 1).expand(4, 3, 16, 24)
    file = save_sample(video, tmp_path / "a")
    assert file == tmp_path / "a.webp"
    with Image.open(file) as image:
        assert (image.format, image.size, image.n_frames, image.info["loop"]) == ("WEBP", (24, 16), 4, 0)
        for i, level in enumerate(levels):
            image.seek(i)
            assert np.asarray(image.convert("RGB")).mean() == pytest.approx(255 * level, abs=3)
            assert image.info["duration"] == 125  # 8 frames a second
    save_sample(video, tmp_path / "b", frame_rate=16)
    with Image.open(tmp_path / "b.webp") as image:
        image.seek(1)
        image.load()
        assert image.info["duration"] == 62
    said = [record.message for record in caplog.records]
    assert said == [
        "videos are written as .webp, without sound; for .mp4 install ffmpeg: pip install 'flowgrpo[video]'"
    ]


def test_audio_is_a_wav_of_16_bit(tmp_path):
    audio = torch.tensor([[0.0, 0.25, 1.0, 1.5], [0.0, -0.25, -1.0, -1.5]])
    file = save_sample(audio, tmp_path / "a", sampling_rate=16000)
    assert file == tmp_path / "a.wav"
    with wave.open(str(file)) as sound:
        assert (sound.getnchannels(), sound.getsampwidth(), sound.getframerate()) == (2, 2, 16000)
        values = np.frombuffer(sound.readframes(4), "<i2").reshape(4, 2)
    assert values.tolist() == [[0, 0], [8192, -8192], [32767, -32767], [32767, -32767]]


@pytest.mark.parametrize("shape", [(5,), (4, 8, 8), (2, 4, 8, 8), (1, 2, 3, 8, 8)])
def test_what_is_none_of_these_is_refused(shape, tmp_path):
    with pytest.raises(ValueError, match="neither an image nor a video nor audio"):
        save_sample(torch.zeros(shape), tmp_path / "a")


def test_a_folder_of_samples_takes_every_modality(tmp_path):
    shapes = [(3, 8, 8), (2, 3, 8, 8), (1, 100), (1, 100)]
    columns = [{}, {}, {"sampling_rate": 8000}, {}]
    samples = [
        Sample(i, Row(f"prompt {i}", i, column), {"mine": 0.5}, torch.rand(shape))
        for i, (shape, column) in enumerate(zip(shapes, columns, strict=True))
    ]
    SampleFolder(tmp_path).write(samples, step=3)
    lines = [json.loads(line) for line in (tmp_path / "samples/manifest.jsonl").read_text().splitlines()]
    assert [line["file"] for line in lines] == [
        "step-000003/0000.png",
        "step-000003/0001.mp4",
        "step-000003/0002.wav",
        "step-000003/0003.wav",
    ]
    assert all(set(line) == {"file", "prompt", "seed", "step", "sampler", "rewards"} for line in lines)
    for line, rate in zip(lines[2:], (8000, 44100), strict=True):
        with wave.open(str(tmp_path / "samples" / line["file"])) as sound:
            assert sound.getframerate() == rate


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_not_written_as_black(tmp_path, value):
    picture = torch.full((3, 4, 4), 0.5)
    picture[1, 2, 3] = value
    with pytest.raises(InputError, match="a: the model's sample is not finite"):
        save_sample(picture, tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


def manifest(folder, **changed):
    line = {"file": "a.png", "prompt": "p", "seed": 0, "step": 0, "rewards": {"r": 0.5}} | changed
    (folder / "manifest.jsonl").write_text(
        json.dumps(line) + "\n" + json.dumps({"file": "b.png", "prompt": "q"}) + "\n"
    )


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"file": "../secret.png"}, "leads out of"),
        ({"file": "a/../../secret.png"}, "leads out of"),
        ({"file": "{folder}/a.png"}, "leads out of"),  # as absolute as /etc/passwd
        ({"file": "link.png"}, "leads out of"),
        ({"file": "links/secret.png"}, "leads out of"),
        ({"file": "a\0.png"}, "is not the name of a file"),
        ({"file": 3}, "a line needs a file and a prompt"),
        ({"prompt": None}, "a line needs a file and a prompt"),
        ({"prompt": "\ud800"}, "half a character"),
        ({"seed": "0"}, "seed is '0', not a whole number"),
        ({"step": None}, "step is None, not a whole number"),
        ({"step": 0.5}, "step is 0.5, not a whole number"),
        ({"rewards": [1.0]}, "rewards is"),
        ({"rewards": {"r": "1"}}, "rewards is"),
        ({"rewards": {"r": float("nan")}}, "rewards is"),
    ],
)
def test_a_manifest_of_others_stays_in_its_folder_and_says_what_manifests_say(tmp_path, changed, said):
    folder = tmp_path / "given"
    folder.mkdir()
    (tmp_path / "secret.png").touch()
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    (folder / "links").symlink_to(tmp_path)
    changed = {k: v.replace("{folder}", str(folder)) if isinstance(v, str) else v for k, v in changed.items()}
    manifest(folder, **changed)
    with pytest.raises(InputError, match=rf"manifest\.jsonl:1: .*({said})") as error:
        read_manifest(folder)
    assert "\n" not in str(error.value)


def test_links_inside_of_a_folder_and_folders_that_are_links_are_fine(tmp_path):
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "there.png").touch()
    (tmp_path / "far" / "a.png").symlink_to("there.png")
    (tmp_path / "near").symlink_to(tmp_path / "far")
    manifest(tmp_path / "near")
    assert [line["file"] for line in read_manifest(tmp_path / "near")] == ["a.png", "b.png"]
