import os

import pytest

from flowgrpo.training.folders import replace_text


def test_a_text_is_there_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    replace_text(path, "old")

    def killed(*paths):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            replace_text(path, "new")
    assert path.read_text() == "old"
    replace_text(path, "half a character \ud800, ö")
    assert path.read_bytes().decode() == "half a character \\ud800, ö"
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]
