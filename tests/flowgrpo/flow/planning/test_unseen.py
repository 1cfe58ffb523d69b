"""Warnings about frames and sounds that are trained and that no reward sees."""

import json

import pytest

from flowgrpo.flow.config import Config
from flowgrpo.flow.planning.unseen import unseen


@pytest.mark.parametrize(("pipeline", "rewards", "said"), [
    ("WanPipeline", [{"use": "pickscore", "frames": "first"}], ["rewards see 1 of the 41 frames"]),
    ("WanPipeline", [{"use": "pickscore", "frames": "first"}, {"use": "jpeg_size", "frames": "every 8"}], []),  # 6 frames
    ("WanPipeline", [{"use": "pickscore", "frames": "first"}, {"use": "motion"}], []),
    ("WanPipeline", [{"use": "judge"}], []),  # 8 frames
    ("WanPipeline", [{"use": "judge", "options": {"frames": 3}}], ["rewards see 3 of the 41 frames"]),
    ("WanPipeline", [{"use": "./mine.py:steady"}], []),
    ("LTX2Pipeline", [{"use": "motion"}], ["the sound of these videos is trained too"]),
    ("LTX2Pipeline", [{"use": "motion"}, {"use": "clap", "of": "soundtrack"}], []),
    ("LTX2Pipeline", [{"use": "clap", "of": "soundtrack"}], ["rewards see 0 of the 41 frames"]),
    ("FluxPipeline", [{"use": "pickscore"}], []),
])  # fmt: skip
def test_what_no_reward_sees_is_told(tmp_path, pipeline, rewards, said):
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": pipeline}))
    call = {} if pipeline == "FluxPipeline" else {"num_frames": 41}
    sentences = unseen(Config(model={"path": str(tmp_path), "call": call}, rewards=rewards))
    assert [sentence[: len(words)] for sentence, words in zip(sentences, said, strict=True)] == said
