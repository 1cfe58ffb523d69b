"""Videos with sound: rewards hear it, files keep it, and saved ones are scored by it."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from runs import metrics
from zoo import SPECIMENS

import rewards
from flowgrpo.cli import main
from flowgrpo.flow.pipeline.inputs.modality import has_soundtrack, sampling_rate
from flowgrpo.flow.pipeline.policy import DiffusersPolicy
from rewards import RewardError
from rewards.audio import Films, join_samples, tensors
from rewards.files import media

FILM = Path(__file__).parents[4] / "data/film.webm"
REWARDS = '''
def loud(audio, prompts, sampling_rate):
    """The loudness, and 0 at any other rate than the vocoder's."""
    return [float(x.square().mean()) * (rate == 16000) for x, rate in zip(audio, sampling_rate)]


def both(videos, prompts, soundtrack):
    return [float(video.mean()) + float(sound.square().mean()) for video, sound in zip(videos, soundtrack)]
'''
HEARD = "rewards=[{use: motion}, {use: './heard.py:loud', of: soundtrack}, {use: './heard.py:both'}]"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ltx2") / "model"
    SPECIMENS["LTX2Pipeline"].build().save_pretrained(folder)
    return folder


def test_rewards_hear_what_a_run_trains_and_its_films_keep_it(workplace, model, capsys):
    shutil.copytree(model, workplace / "model")
    (workplace / "heard.py").write_text(REWARDS)
    call = f"model.call={json.dumps(SPECIMENS['LTX2Pipeline'].call)}"
    short = ["train.iterations=1", "train.groups=1", "train.group_size=2", "train.updates=1"]
    assert main(["train", "tiny.yaml", "model.path=model", call, HEARD, *short, "eval.prompts=2"]) == 0
    assert "sound of these videos" not in capsys.readouterr().err
    (line,) = metrics(workplace / "runs/t")
    assert line["policy/max_abs_log_ratio"] == 0
    assert line["reward/loud/mean"] > 0
    assert line["reward/both/mean"] > line["reward/loud/mean"]

    rows = [json.loads(line) for line in (workplace / "runs/t/samples/manifest.jsonl").read_text().splitlines()]
    rate, sound = media.sound(workplace / "runs/t/samples" / rows[0]["file"])
    assert rate == 16000
    assert sound.std() > 0
    uses = ["{use: './heard.py:loud', of: soundtrack}", "./heard.py:both"]
    capsys.readouterr()
    assert main(["score", *uses, "--samples", "runs/t/samples", "--format", "json"]) == 0
    scored = json.loads(capsys.readouterr().out)
    for name in ("loud", "both"):
        in_run = [row["rewards"][name] for row in rows]
        assert [row["rewards"][name] for row in scored] == pytest.approx(in_run, rel=0.1)


@pytest.mark.parametrize(("name", "call", "makes"), [
    ("LTX2Pipeline", {}, True),
    ("Kandinsky6TI2VAPipeline", {}, True),
    ("Kandinsky6TI2VAPipeline", {"sample_audio": False}, False),
    ("WanPipeline", {}, False),
])  # fmt: skip
def test_which_pipelines_make_sound(name, call, makes):
    specimen = SPECIMENS[name]
    pipe = specimen.build()
    assert has_soundtrack(type(pipe), call) == makes
    samples = DiffusersPolicy(pipe, {**specimen.call, **call, "num_inference_steps": 2}).sample(["a dog barks"] * 2)
    assert isinstance(samples, Films) == makes
    if makes:
        assert sampling_rate(pipe) in (16000, 44100)
        assert samples.soundtrack.ndim == 3
        assert len(samples) == 2


def test_films_are_cut_and_joined_as_tensors_are():
    films = Films(torch.rand(3, 2, 3, 4, 4), torch.rand(3, 1, 9))
    again = join_samples([films[:1], films[[1, 2]]])
    assert all(torch.equal(a, b) for a, b in zip(tensors(again), tensors(films), strict=True))
    assert [len(each.soundtrack) for each in films] == [1, 1, 1]
    assert torch.equal(films.flip(-1).soundtrack, films.soundtrack.flip(-1))


def test_a_soundtrack_asked_of_silent_videos_is_one_sentence():
    loudness = rewards.load("loudness", of="soundtrack")
    films = Films(torch.rand(2, 2, 3, 4, 4), torch.tensor([[[0.5]], [[-0.25]]]))
    assert loudness(films, ["a", "b"], {}).tolist() == [0.5, 0.25]
    with pytest.raises(RewardError, match="^the reward 'loudness' has of=soundtrack, but these samples are no videos"):
        loudness(films.frames, ["a", "b"], {})
    with pytest.raises(RewardError, match="frames choose pictures and of=soundtrack the sound, leave one out"):
        rewards.load("loudness", of="soundtrack", frames="first")


@pytest.mark.parametrize(("file", "said"), [
    ("a.webm", "a.webm cannot be read (it has no sound)"),
    ("a.wav", "a.wav is no film with sound, which are .mov, .mp4, .webm"),
])  # fmt: skip
def test_a_file_without_a_soundtrack_is_named(workplace, capsys, file, said):
    (workplace / "silent").mkdir()
    shutil.copy(FILM, workplace / "silent" / file)
    assert main(["score", "{use: loudness, of: soundtrack}", "--samples", "silent"]) == 2
    assert said in capsys.readouterr().err


def test_a_server_takes_no_soundtrack(workplace, capsys):
    (workplace / "heard.py").write_text(REWARDS)
    assert main(["serve", "{use: loudness, of: soundtrack}", "--port", "0"]) == 2
    assert "loudness: of belongs into the config of the run" in capsys.readouterr().err
    assert main(["serve", "./heard.py:both", "--port", "0"]) == 2
    assert "both: a sound does not travel beside its video" in capsys.readouterr().err


def test_no_column_of_the_prompts_takes_the_name_of_the_soundtrack():
    films = Films(torch.rand(1, 2, 3, 4, 4), torch.rand(1, 1, 9))
    reward = rewards.Reward("heard", lambda videos, prompts, soundtrack: [1.0])
    assert reward(films, ["a"], {}).tolist() == [1.0]
    with pytest.raises(RewardError, match="gets the sound of videos as soundtrack, so no column can have that name"):
        reward(films, ["a"], {"soundtrack": ["x"]})
