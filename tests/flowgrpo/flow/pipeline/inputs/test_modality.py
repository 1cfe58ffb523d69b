import json
import wave

import diffusers
import pytest
from runs import metrics
from zoo import SPECIMENS

from flowgrpo.cli import main
from flowgrpo.flow.pipeline.inputs.modality import expected_shape, frame_rate, modality_of, sampling_rate, task_of
from rewards.files import media


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("StableDiffusion3Pipeline", "image"),
        ("QwenImageEditPlusPipeline", "image"),
        ("FluxKontextPipeline", "image"),
        ("WanPipeline", "video"),
        ("WanAnimatePipeline", "video"),
        ("SanaVideoPipeline", "video"),
        ("EasyAnimatePipeline", "video"),
        ("HunyuanVideo15ImageToVideoPipeline", "video"),
        ("LTX2Pipeline", "video"),
        ("StableAudio3Pipeline", "audio"),
        ("AceStepPipeline", "audio"),
        ("LongCatAudioDiTPipeline", "audio"),
    ],
)
def test_the_call_tells_what_a_pipeline_makes(name, kind):
    assert modality_of(getattr(diffusers, name)) == kind


@pytest.mark.parametrize(
    ("name", "call", "shape"),
    [
        ("StableDiffusion3Pipeline", {}, (3, 64, 64)),
        ("StableDiffusion3Pipeline", {"height": 32, "width": None}, (3, 32, 64)),
        ("WanPipeline", {}, (81, 3, 480, 832)),  # its own defaults
        ("WanPipeline", {"num_frames": 5, "height": 16, "width": 24}, (5, 3, 16, 24)),
        ("SanaVideoPipeline", {"frames": 9, "height": 16, "width": 24}, (9, 3, 16, 24)),
        ("StableAudio3Pipeline", {"duration": 3.0}, (2, 44100)),
    ],
)
def test_the_shape_of_a_sample_is_known_from_the_call(name, call, shape):
    assert expected_shape(getattr(diffusers, name), call) == shape


def test_the_sampling_rate_is_that_of_a_component():
    assert sampling_rate(SPECIMENS["StableAudio3Pipeline"].build()) == 640
    assert sampling_rate(SPECIMENS["LongCatAudioDiTPipeline"].build()) == 160
    assert sampling_rate(SPECIMENS["WanPipeline"].build()) is None


def test_rewards_meet_the_modality_of_the_model_before_its_weights_are_loaded(workplace, capsys):
    (workplace / "model").mkdir()
    (workplace / "model/model_index.json").write_text('{"_class_name": "WanPipeline"}')  # and no weights
    call = "model.call={num_frames: 5, height: 16, width: 24}"
    assert main(["train", "tiny.yaml", "model.path=model", call, "rewards=[{use: motion}, {use: loudness}]"]) == 2
    said = capsys.readouterr().err
    assert "the reward 'loudness' failed on two synthetic samples" in said
    assert "not shape (2, 5, 3, 16, 24)" in said


def test_an_audio_model_hands_its_rewards_a_sampling_rate_before_training(workplace, capsys):
    (workplace / "model").mkdir()
    (workplace / "model/model_index.json").write_text('{"_class_name": "StableAudio3Pipeline"}')
    (workplace / "mine.py").write_text(
        "def redness(audio, prompts, sampling_rate):\n    raise ValueError(f'{tuple(audio.shape)} at {sampling_rate}')\n"
    )
    assert main(["train", "tiny.yaml", "model.path=model", "model.call={}"]) == 2
    assert "(2, 2, 44100) at [44100, 44100]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "call", "rate"),
    [
        ("WanPipeline", {}, 16),
        ("WanPipeline (5B)", {}, 24),
        ("WanAnimatePipeline", {}, 30),
        ("HunyuanVideoPipeline", {}, 24),
        ("LTXPipeline", {}, 25),
        ("LTXPipeline", {"frame_rate": 30}, 30),
        ("LTX2Pipeline", {}, 24),
    ],
)
def test_a_video_has_the_rate_of_its_model_or_of_its_call(name, call, rate):
    assert frame_rate(SPECIMENS[name].build(), call) == rate


@pytest.mark.parametrize(
    ("name", "given", "task"),
    [
        ("StableDiffusion3Pipeline", (), "text-to-image"),
        ("FluxKontextPipeline", ("image",), "image-to-image"),
        ("WanPipeline", (), "text-to-video"),
        ("WanImageToVideoPipeline", ("image", "last_image"), "image-to-video"),
        ("WanVideoToVideoPipeline", ("video",), "video-to-video"),
        ("StableAudio3Pipeline", (), "text-to-audio"),
    ],
)
def test_the_hub_has_a_word_for_what_a_pipeline_does(name, given, task):
    assert task_of(getattr(diffusers, name), given) == task


SUFFIX = {"WanPipeline": ".mp4", "StableAudio3Pipeline": ".wav"}


@pytest.mark.parametrize(("name", "reward"), [("WanPipeline", "motion"), ("StableAudio3Pipeline", "rate")])
def test_videos_and_audio_go_from_training_to_gallery_export_and_sampling(name, reward, workplace):
    specimen = SPECIMENS[name]
    specimen.build().save_pretrained(workplace / "model")
    (workplace / "rate.py").write_text("def rate(audio, prompts, sampling_rate):\n    return sampling_rate\n")
    use = {"motion": "motion", "rate": "./rate.py:rate"}[reward]
    call = [f"{key}={json.dumps(value)}" for key, value in specimen.call.items()]
    settings = ["model.path=model", f"model.call={json.dumps(specimen.call)}", f"rewards=[{{use: {use}}}]"]
    short = ["train.iterations=1", "train.groups=1", "train.group_size=2", "train.updates=1"]
    short += ["run.patience=null", "eval.prompts=2"]
    assert main(["train", "tiny.yaml", *settings, *short]) == 0

    (line,) = metrics(workplace / "runs/t")
    assert line["policy/max_abs_log_ratio"] == 0
    assert (line["policy/grad_norm"] > 0) == (reward == "motion")  # the other gives all sounds the same
    lines = [json.loads(line) for line in (workplace / "runs/t/samples/manifest.jsonl").read_text().splitlines()]
    files = [workplace / "runs/t/samples" / line["file"] for line in lines]
    assert [line["step"] for line in lines] == [0, 0, 1, 1]
    assert all(file.suffix == SUFFIX[name] for file in files)
    if name == "WanPipeline":
        assert [frame.size for frame in media.film(files[0])] == [(32, 32)] * specimen.call["num_frames"]
        assert all(0 < line["rewards"]["motion"] < 1 for line in lines)
    else:
        with wave.open(str(files[0])) as sound:
            assert (sound.getframerate(), sound.getnchannels(), sound.getnframes()) == (640, 2, 320)  # half a second
        assert all(line["rewards"]["rate"] == 640 for line in lines)
    assert (workplace / "runs/t/gallery.html").stat().st_size > 10_000
    shown = {".mp4": '<video src="data:video/mp4', ".wav": "<audio controls"}[SUFFIX[name]]
    assert (workplace / "runs/t/gallery.html").read_text().count(shown) == 4

    assert main(["export", "runs/t", "--out", "out"]) == 0
    card = (workplace / "out/README.md").read_text()
    assert {".mp4": ".frames[0]", ".wav": ".audios[0]"}[SUFFIX[name]] in card
    assert {".mp4": '<video controls loop src="sample-0.mp4">', ".wav": '<audio controls src="sample-0.wav">'}[
        SUFFIX[name]
    ] in card
    assert main(["sample", "model", "--prompt", "a", "--adapter", "out", "--out", "s", *call]) == 0
    rate = json.loads((workplace / "out/sampler.json").read_text()).get("frame_rate")
    assert rate == {".mp4": 16, ".wav": None}[SUFFIX[name]]
    assert (workplace / "s/0000").with_suffix(SUFFIX[name]).is_file()
