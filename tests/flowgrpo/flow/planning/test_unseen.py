"""Warnings about frames and sounds that are trained and that no reward sees."""

import json

import pytest

from flowgrpo.errors import InputError
from flowgrpo.flow.config import Config
from flowgrpo.flow.planning.unseen import unseen


@pytest.mark.parametrize(("pipeline", "rewards", "said"), [
    ("WanPipeline", [{"use": "pickscore", "frames": "first"}], ["rewards see 1 of the 41 frames"]),
    ("WanPipeline", [{"use": "pickscore", "frames": "first"}, {"use": "jpeg_size", "frames": "every 8"}], []),  # 6 frames
    ("WanPipeline", [{"use": "pickscore", "frames": "first"}, {"use": "motion"}], []),
    ("WanPipeline", [{"use": "judge"}], []),  # 8 frames
    ("WanPipeline", [{"use": "judge", "options": {"frames": 3}}], ["rewards see 3 of the 41 frames"]),
    ("WanPipeline", [{"use": "preference", "options": {"scores": "motion"}}], []),
    ("WanPipeline", [{"use": "./mine.py:both"}], []),
    ("LTX2Pipeline", [{"use": "motion"}], ["the sound of these videos is trained too"]),
    ("LTX2Pipeline", [{"use": "motion"}, {"use": "clap", "of": "soundtrack"}], []),
    ("LTX2Pipeline", [{"use": "./mine.py:both"}], []),
    ("LTX2Pipeline", [{"use": "clap", "of": "soundtrack"}], ["rewards see 0 of the 41 frames"]),
    ("FluxPipeline", [{"use": "pickscore"}], []),
])  # fmt: skip
def test_what_no_reward_sees_is_told(tmp_path, monkeypatch, pipeline, rewards, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def both(videos, prompts, soundtrack):\n    return [0.0] * len(prompts)\n")
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": pipeline}))
    call = {} if pipeline == "FluxPipeline" else {"num_frames": 41}
    sentences = unseen(Config(model={"path": str(tmp_path), "call": call}, rewards=rewards))
    assert [sentence[: len(words)] for sentence, words in zip(sentences, said, strict=True)] == said


def test_a_wrong_number_of_frames_is_one_sentence(tmp_path):
    (tmp_path / "model_index.json").write_text('{"_class_name": "WanPipeline"}')
    settings = Config(model={"path": str(tmp_path)}, rewards=[{"use": "judge", "options": {"frames": "lots"}}])
    with pytest.raises(
        InputError, match="^rewards: judge: options.frames: there is no rule 'lots', take first, middle"
    ):
        unseen(settings)
