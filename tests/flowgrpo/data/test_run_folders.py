"""The end of an error message that names a run, a file or a folder near a wrong path."""

from pathlib import Path

import pytest

from flowgrpo.data.run_folders import hint, nearest_file


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("both", "lora", "redder"):
        folder = Path("runs") / name
        folder.mkdir(parents=True)
        (folder / "config.yaml").touch()
    Path("redder-lora").mkdir()


@pytest.mark.parametrize(
    ("wrong", "end"),
    [
        ("runs/lor", ", did you mean 'runs/lora'?"),
        ("redder-lora", ", did you mean 'runs/redder'?"),
        ("runs", ", did you mean 'runs/lora'?"),
        ("pictures", "; there are runs/both, runs/lora, runs/redder"),
    ],
)
def test_a_run_is_proposed_if_its_path_or_name_is_near(runs, wrong, end):
    assert hint(Path(wrong)) == end


def test_what_lies_beside_is_proposed_by_its_name(runs):
    assert nearest_file(Path("redder-lra")) == ", did you mean 'redder-lora'?"
    assert nearest_file(Path("absent/redder-lora")) == nearest_file(Path("unlike")) == ""
