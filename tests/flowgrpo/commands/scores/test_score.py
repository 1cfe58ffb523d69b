import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from film_files import H264, HEVC, VP9, blocks, write_film
from PIL import Image
from planted_run import written
from runs import CALL

from flowgrpo.cli import main
from flowgrpo.commands.scores.score import list_files, read, score_folder
from flowgrpo.errors import InputError
from flowgrpo.training.reports.samples import save_sample
from rewards import Reward
from rewards.compute import default_device

NOTHING = r"holds no manifest\.jsonl and no picture, video or sound"
APPLE_DOUBLE = b"\0\5\x16\7"


@pytest.fixture
def folder(tmp_path):
    for name, colour in {"a_red_thing": (255, 0, 0), "a_blue_thing": (0, 0, 255)}.items():
        Image.new("RGB", (8, 8), colour).save(tmp_path / f"{name}.png")
    return tmp_path


def redness(images, prompts):
    return images[:, 0].mean((1, 2))


def manifest(folder, *lines):
    (folder / "manifest.jsonl").write_text(written(lines))


def test_a_frame_after_the_first_that_is_broken_is_one_sentence(tmp_path):
    path = tmp_path / "a.webp"
    shades = [Image.fromarray(np.random.default_rng(i).integers(0, 256, (9, 9, 3), dtype=np.uint8)) for i in range(2)]
    shades[0].save(path, save_all=True, append_images=shades[1:], lossless=True)
    data = bytearray(path.read_bytes())
    second = data.rindex(b"VP8L") + 16
    data[second : second + 20] = b"\xff" * 20
    path.write_bytes(data)
    with pytest.raises(InputError, match=r"^--samples: .*a\.webp cannot be read \(failed to read next frame\)$"):
        read(path)


def test_names_of_files_are_prompts(folder):
    asked = []
    reward = Reward("redness", lambda images, prompts: asked.extend(prompts) or redness(images, prompts))
    found = {line["file"]: line["rewards"]["redness"] for line in score_folder(folder, [reward])}
    assert found == {"a_blue_thing.png": 0.0, "a_red_thing.png": 1.0}
    assert asked == ["a blue thing", "a red thing"]


def test_a_film_of_10_bits_scores_as_its_copy_of_8(tmp_path, capsys):
    (tmp_path / "bright.py").write_text("def bright(samples, prompts):\n    return samples.flatten(1).mean(1)\n")
    (tmp_path / "films").mkdir()
    films = {"a.mp4": (H264, "yuv420p"), "b.mp4": (HEVC, "yuv420p10le"), "c.webm": (VP9, "yuv420p10le")}
    for name, (codec, pixel_format) in (films | {"d.mp4": (H264, "yuv420p10le")}).items():
        write_film(tmp_path / "films" / name, blocks(), pixel_format, *codec)
    command = ["score", str(tmp_path / "bright.py:bright"), "--samples", str(tmp_path / "films"), "--format", "json"]
    assert main(command) == 0
    told = capsys.readouterr()
    assert told.err == ""
    scores = [line["rewards"]["bright"] for line in json.loads(told.out)]
    assert scores == pytest.approx([blocks().mean() / 255] * 4, abs=0.01)
    assert scores == pytest.approx([scores[0]] * 4, abs=1e-3)


@pytest.mark.parametrize("kind", ["png", "webp", "gif"])
def test_a_moving_picture_is_all_of_its_frames(tmp_path, kind):
    shades = [Image.new("RGB", (4, 2), (80 * i, 200, 30)) for i in range(3)]
    shades[0].save(tmp_path / f"a.{kind}", save_all=True, append_images=shades[1:], lossless=True)
    assert read(tmp_path / f"a.{kind}")[0].shape == (3, 3, 2, 4)
    shades[1].save(tmp_path / f"b.{kind}", lossless=True)
    assert read(tmp_path / f"b.{kind}")[0].shape == (3, 2, 4)


@pytest.mark.parametrize(
    ("name", "form"), [("a.tiff", "TIFF"), ("a.TIF", "TIFF"), ("a.jfif", "JPEG"), ("a.BMP", "BMP")]
)
def test_pictures_of_every_suffix_are_scored(tmp_path, name, form):
    Image.new("RGB", (8, 8), (255, 0, 0)).save(tmp_path / name, form, quality=100)
    (found,) = score_folder(tmp_path, [Reward("redness", redness)])
    assert (found["file"], found["rewards"]["redness"]) == (name, pytest.approx(1, abs=0.02))


def test_one_line_says_which_files_are_left_out(folder, capsys):
    left_out = ("notes.txt", "a.heic", "b.HEIC", "scores.json", "film.mkv")
    for name in (*left_out, "._a_red_thing.png", "._notes.txt", ".DS_Store"):
        (folder / name).write_bytes(APPLE_DOUBLE)
    (folder / "more.png.d").mkdir()
    found = score_folder(folder, [Reward("redness", redness)])
    assert [line["file"] for line in found] == ["a_blue_thing.png", "a_red_thing.png"]
    (line,) = capsys.readouterr().err.splitlines()
    said = f"--samples: left out 5 of the files in {folder}: a.heic, b.HEIC, film.mkv and 2 more (only .png, .jpg, "
    assert line.startswith(said)
    assert line.endswith(".wav are read)")
    for name in left_out[1:]:
        (folder / name).unlink()
    score_folder(folder, [Reward("redness", redness)])
    assert f"left out 1 of the files in {folder}: notes.txt (only" in capsys.readouterr().err


def test_of_a_folder_of_other_files_the_first_are_named(tmp_path):
    left_out = r"; left out 1 of .*: a\.heic \(only \.png, .* are read\)"
    for name, said in ((None, "$"), ("._a.png", "$"), ("a.heic", left_out)):
        if name is not None:
            (tmp_path / name).write_bytes(APPLE_DOUBLE)
        with pytest.raises(InputError, match=NOTHING + said):
            list_files(tmp_path)


def test_pictures_that_a_manifest_does_not_name_are_said_to_be_left_out(folder, capsys):
    manifest(folder, {"file": "a_red_thing.png", "prompt": "p"})
    (folder / "votes.jsonl").write_text("")  # a run writes other files, too
    (folder / "._a_red_thing.png").write_bytes(b"")
    score_folder(folder, [Reward("redness", redness)])
    said = f"left out 1 of the files in {folder}: a_blue_thing.png (its manifest.jsonl does not name them)"
    assert capsys.readouterr().err == f"--samples: {said}\n"
    (folder / "a_blue_thing.png").unlink()
    score_folder(folder, [Reward("redness", redness)])
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", ["a.heic", "a.txt", "a", "film.mkv"])
def test_a_manifest_that_names_what_is_no_sample_is_refused(folder, name):
    (folder / name).write_text("7")
    manifest(folder, {"file": name, "prompt": "p"})
    said = rf"manifest\.jsonl: {name} is no sample, only \.png, .* and \.json are read; convert it to one$"
    with pytest.raises(InputError, match=said):
        score_folder(folder, [Reward("redness", redness)])


def test_a_manifest_gives_prompts_and_columns(folder):
    manifest(folder, *({"file": f"a_{c}_thing.png", "prompt": "p", "wanted": c} for c in ("red", "blue")))
    reward = Reward("named", lambda images, prompts, wanted: [None if w == "blue" else 2.0 for w in wanted])
    found = score_folder(folder, [reward])
    assert [(line["prompt"], line["rewards"]["named"]) for line in found] == [("p", 2.0), ("p", None)]


def test_a_reward_that_applies_to_no_sample_is_said(folder, capsys):
    score_folder(
        folder, [Reward("redness", redness), Reward("task", lambda images, prompts, **_: [None] * len(prompts))]
    )
    said = "task: it applies to none of the samples; it may need columns that they lack, or other prompts"
    assert capsys.readouterr().err == f"{said}\n"


def test_a_group_wise_reward_meets_the_files_of_a_prompt(folder):
    lines = [{"file": f"a_{c}_thing.png", "prompt": p} for c, p in (("red", "x"), ("blue", "y"), ("red", "y"))]
    manifest(folder, *lines)
    reward = Reward("size", lambda images, prompts: [len(prompts)] * len(prompts), group_wise=True)
    assert [line["rewards"]["size"] for line in score_folder(folder, [reward])] == [1, 2, 2]


def test_samples_are_read_as_they_were_written(tmp_path):
    video = torch.rand(3, 3, 8, 8).round()
    assert read(save_sample(video, tmp_path / "v"))[0].shape == (3, 3, 8, 8)
    picture = torch.rand(3, 8, 8)
    torch.testing.assert_close(read(save_sample(picture, tmp_path / "p"))[0], picture, atol=0.5 / 255, rtol=0)
    sound = torch.rand(2, 100) * 2 - 1
    torch.testing.assert_close(read(save_sample(sound, tmp_path / "s"))[0], sound, atol=1e-4, rtol=0)
    (tmp_path / "broken.png").write_bytes(b"no picture")
    with pytest.raises(InputError, match=r"broken.png"):
        read(tmp_path / "broken.png")


def test_the_command_scores_for_people_and_programs(folder, printed, refused):
    np.savetxt(folder / "ignored.txt", [0])
    found = printed("score", "jpeg_size", "--samples", folder, "--format", "json")
    assert [set(line) for line in found] == [{"file", "prompt", "rewards"}] * 2
    assert all(line["rewards"]["jpeg_size"] < 0 for line in found)
    assert "a_red_thing.png" in printed("score", "jpeg_size", "--samples", folder)
    assert "there is no folder" in refused("score", "jpeg_size", "--samples", folder / "no")
    said = refused("score", "shapes", "--samples", folder)  # "a red thing" is not a caption of its grammar
    assert "a blue thing" in said


def test_a_reward_that_raises_is_told_with_its_file_and_line(folder, refused, monkeypatch):
    monkeypatch.chdir(folder)
    (folder / "mine.py").write_text("def broken(images, prompts):\n    return prompts.nothing\n")
    place, error = "one of a_blue_thing.png to a_red_thing.png", "'list' object has no attribute 'nothing' at mine.py:2"
    said = f"failed on {place}: AttributeError: {error}"
    assert refused("score", "./mine.py:broken", "--samples", ".") == f"the reward 'broken' {said}"


MODEL = """
class Model:
    def __init__(self, dtype="float32", batch_size=16, scale=1):
        self.options = (dtype, batch_size, scale)
    def to(self, device):
        print("to", device)
    def __call__(self, images, prompts):
        print(*self.options, len(prompts))
        return [self.options[2]] * len(prompts)
"""


def test_memory_options_reach_the_rewards_that_take_them(folder, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    (folder / "held.py").write_text(MODEL)

    def said(*arguments):
        assert main(["score", *arguments, "--samples", ".", "--format", "json"]) == 0
        lines = capsys.readouterr().out.splitlines()
        return lines[: lines.index("[")], json.loads("".join(lines[lines.index("[") :]))

    assert said("./held.py")[0] == [f"to {default_device()}", "float32 16 1 2"]
    options = ["--dtype", "bfloat16", "--batch-size", "1"]
    lines, found = said("./held.py", "jpeg_size", *options, "--device", "meta")
    assert lines == ["to meta", "bfloat16 1 1 1", "bfloat16 1 1 1"]
    assert list(found[0]["rewards"]) == ["held", "jpeg_size"]
    own = "{use: ./held.py, name: own, options: {dtype: float16, scale: 3}}"
    lines, found = said(own, *options)
    assert lines == [f"to {default_device()}", "float16 1 3 1", "float16 1 3 1"]
    assert found[0]["rewards"] == {"own": 3}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["jpeg_size", "--dtype", "bfloat16"], "--dtype: jpeg_size takes none, leave it out"),
        (
            ["{use: jpeg_size, weight: 2}"],
            "jpeg_size: weight belongs into the config of a run; here each reward is told",
        ),
        (["{use: jpeg_size, only: {task: ocr}}"], "jpeg_size: only belongs into the config of a run"),
        (["{us: jpeg_size}"], "REWARD.us: unknown key, did you mean 'use'?"),
        (["{use: jpeg_size"], "REWARD: not valid YAML"),
    ],
)
def test_wrong_uses_are_one_sentence(folder, refused, arguments, said):
    assert refused("score", *arguments, "--samples", folder).startswith(said)


@pytest.mark.parametrize("command", [["score", "jpeg_size", "--samples"], ["gallery"]])
@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("../secret.png", "'../secret.png' leads out of"),
        ("none.png", "there is no file"),
        ("fifo.png", "there is no file"),
        ("a" * 300 + ".png", "there is no file"),
        ("circle.png", "circle.png"),
        ("broken.png", "broken.png cannot be read"),
        ("broken.wav", "broken.wav cannot be read"),
        ("eps.png", "eps.png cannot be read"),
        ("deep.json", "deep.json"),
        ("half.json", "half.json"),
    ],
)
def test_a_folder_of_others_is_scored_and_shown_or_one_sentence(folder, refused, command, file, said):
    Image.new("RGB", (8, 8)).save(folder.parent / "secret.png")
    os.mkfifo(folder / "fifo.png")
    (folder / "circle.png").symlink_to("circle.png")
    for name in ("broken.png", "broken.wav"):
        (folder / name).write_bytes(b"no sample")
    Image.new("RGB", (8, 8)).save(folder / "eps.png", "EPS")
    (folder / "deep.json").write_text('{"text": ' + "[" * 100_000)
    (folder / "half.json").write_text(r'{"text": "\ud800", "tokens": ["a"], "steps": [0]}')
    manifest(folder, *[{"prompt": "p", "file": file}] * 2)
    assert said in refused(*command, folder)
    (folder.parent / "secret.png").unlink()


def test_a_link_in_a_folder_without_a_manifest_does_not_lead_out_of_it(folder, tmp_path_factory, refused):
    (folder / "link.png").symlink_to(tmp_path_factory.mktemp("other") / "secret.png")
    assert "'link.png' leads out of" in refused("score", "jpeg_size", "--samples", folder)


def test_a_manifest_that_was_cut_off_is_scored_as_far_as_it_goes(folder, printed):
    line = json.dumps({"file": "a_red_thing.png", "prompt": "p"})
    (folder / "manifest.jsonl").write_text(line + "\n" + line[:20])
    with pytest.warns(UserWarning, match="the last line, cut off, and left out"):
        assert len(printed("score", "jpeg_size", "--samples", folder, "--format", "json")) == 1


def test_prompts_are_printed_as_they_are_and_do_not_steer_the_terminal(tmp_path, printed):
    prompts = ["[/INST] a [bold]red[/bold] :smile: thing", "[INST]", "clear \x1b[2J\x9b1m bell\x07 end", "zwei\nZeilen"]
    for i in range(4):
        Image.new("RGB", (8, 8)).save(tmp_path / f"[i]{i}.png")
    manifest(tmp_path, *({"file": f"[i]{i}.png", "prompt": prompt} for i, prompt in enumerate(prompts)))
    (tmp_path / "mine.py").write_text("def red(images, prompts):\n    return [0.5] * len(prompts)\n")
    said = printed("score", f"{tmp_path / 'mine.py'}:red", "--samples", tmp_path)
    words = " ".join(said.split())
    assert "[i]0.png [/INST] a [bold]red[/bold] :smile: thing 0.500" in words
    assert "[i]1.png [INST] 0.500" in words
    assert r"clear \x1b[2J\x9b1m bell\x07 end" in words
    assert not set(said) & {"\x1b", "\x9b", "\x07"}
    assert "mean 4 samples 0.500" in words


def test_a_long_file_name_is_not_cut_short(tmp_path, printed):
    name = "a_" + "very_" * 30 + "long_name.png"
    Image.new("RGB", (8, 8)).save(tmp_path / name)
    manifest(tmp_path, {"file": name, "prompt": "a"})
    lines = printed("score", "jpeg_size", "--samples", tmp_path).splitlines()
    assert "".join(line.split()[0] for line in lines[1:-1]) == name


def test_rewards_of_samples_meet_the_columns_of_their_prompts(workplace, tiny_model, printed):
    Path("rows.jsonl").write_text('{"prompt": "a red circle", "wanted": 3}\n{"prompt": "a blue square"}\n')
    Path("wanted.py").write_text("def wanted(images, prompts, wanted):\n    return wanted\n")
    printed("sample", tiny_model, "--prompts", "rows.jsonl", "--out", "o", *(f"{k}={v}" for k, v in CALL.items()))
    found = printed("score", "./wanted.py:wanted", "--samples", "o", "--format", "json")
    assert [line["rewards"]["wanted"] for line in found] == [3, None]
