import os

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.io import wavfile

from flowgrpo.data import conditions, prompts
from flowgrpo.errors import InputError


def test_files_of_a_row_are_found_beside_the_prompt_file_and_texts_stay_texts(tmp_path):
    (tmp_path / "pictures").mkdir()
    Image.new("RGB", (4, 2), (255, 0, 0)).save(tmp_path / "pictures" / "red.png")
    line = '{{"prompt": "a", "image": "{0}", "images": ["{0}"], "text": "write logo.png", "n": 3}}'
    (tmp_path / "rows.jsonl").write_text(line.format("pictures/red.png"))
    (row,) = prompts.load(str(tmp_path / "rows.jsonl"))
    file = str(tmp_path / "pictures" / "red.png")
    assert row.columns == {"image": file, "images": [file], "text": "write logo.png", "n": 3}
    conditions.check([row.columns], {"image", "images"}, "prompts.train")
    picture = conditions.load_file(row.columns["image"])
    assert (picture.mode, picture.size, picture.getpixel((0, 0))) == ("RGB", (4, 2), (255, 0, 0))
    assert conditions.load_file(row.columns["images"]) == [picture]
    assert conditions.resolve_files("a" * 300 + ".png", tmp_path) == "a" * 300 + ".png"  # a text that ends so
    assert conditions.load_file(row.columns["n"]) == 3


def test_a_picture_is_turned_as_its_camera_says(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # orientation: turn by a quarter
    Image.new("RGB", (4, 2)).save(tmp_path / "turned.jpg", exif=exif)
    assert conditions.load_file(str(tmp_path / "turned.jpg")).size == (2, 4)


def test_a_file_that_changes_is_read_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (4, 2)).save("a.png")
    assert conditions.load_file("a.png").size == (4, 2)
    Image.new("RGB", (6, 2)).save("a.png")
    os.utime("a.png", ns=(0, 0))
    assert conditions.load_file("a.png").size == (6, 2)
    os.unlink("a.png")
    with pytest.raises(InputError, match=r"there is no file a\.png"):
        conditions.check([{"image": "a.png"}], {"image"}, "prompts.train")


@pytest.mark.parametrize("name", ["a.tiff", "a.TIF", "a.jfif", "a.bmp"])
def test_pictures_of_every_suffix_are_read(tmp_path, name):
    form = {"a.jfif": "JPEG", "a.bmp": "BMP"}.get(name, "TIFF")
    Image.new("RGB", (4, 2), (200, 60, 30)).save(tmp_path / name, form, quality=100)
    (tmp_path / "rows.jsonl").write_text(f'{{"prompt": "a", "image": "{name}"}}')
    (row,) = prompts.load(str(tmp_path / "rows.jsonl"))
    conditions.check([row.columns], {"image"}, "prompts.train")
    assert np.allclose(conditions.load_file(row.columns["image"]).getpixel((0, 0)), (200, 60, 30), atol=3)


@pytest.mark.parametrize(("kind", "silent"), [(np.uint8, 128), (np.int16, 0), (np.float32, 0)])
def test_sounds_are_between_minus_one_and_one(tmp_path, kind, silent):
    low = np.iinfo(kind).min if np.issubdtype(kind, np.integer) else -1
    wavfile.write(tmp_path / "a.wav", 8000, np.array([[silent, silent], [silent, low]], dtype=kind))
    assert torch.equal(conditions.load_file(str(tmp_path / "a.wav")), torch.tensor([[0.0, 0.0], [0.0, -1.0]]))


def test_an_animation_is_a_list_of_pictures(tmp_path):
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue", "green")]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    assert [frame.size for frame in conditions.load_file(str(tmp_path / "a.gif"))] == [(4, 4)] * 3


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("no.png", "prompts.train: there is no file no.png"),
        (["no.png"], "prompts.train: there is no file no.png"),
        ("https://example.org/a.png", "is an address, not a file; download it first"),
        ("broken.png", "broken.png cannot be read"),
        ("broken.gif", "broken.gif cannot be read"),
        ("broken.wav", "broken.wav cannot be read"),
        ("a.mp4", r"a.mp4 cannot be read \(it is not MP4, MOV or WebM\)"),
        ("fifo.png", "fifo.png is not a regular file"),
        ("a" * 300 + ".png", "cannot be read .*File name too long"),
        ("depth.tif", r"depth.tif cannot be read \(which of its values is white is not known"),
        ("a.heic", r"image is 'a.heic', but of files only .png, .jpg, .*, .wav are read; convert it to one"),
        (["depth.exr"], "image is 'depth.exr', but of files only .png"),
    ],
)
def test_what_cannot_be_read_is_one_sentence(tmp_path, monkeypatch, value, said):
    monkeypatch.chdir(tmp_path)
    for name in ("broken.png", "broken.gif", "broken.wav", "a.mp4"):
        (tmp_path / name).write_text("no picture")
    Image.fromarray(np.full((4, 4), 0.5, np.float32)).save("depth.tif")
    os.mkfifo(tmp_path / "fifo.png")
    with pytest.raises(InputError, match=said):
        conditions.check([{"image": value}], {"image"}, "prompts.train")
    conditions.check([{"image": value, "style": "soft"}], {"video", "style"}, "prompts.train")  # not a condition here
