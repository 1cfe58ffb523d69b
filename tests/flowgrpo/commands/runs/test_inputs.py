"""What a run keeps of the files that it was made from, and from where it can be gone on with."""

import json
import os
import shutil
from hashlib import sha256

import pytest
import yaml
from conftest import copy_run, furnished

from flowgrpo import config
from flowgrpo.cli import main
from flowgrpo.commands.runs import inputs


def listed(run):
    return {
        (line["key"], line["copy"]): line
        for line in map(json.loads, (run / "inputs" / "files.jsonl").read_text().splitlines())
    }


@pytest.fixture
def settings(tmp_path):
    """Prompts, evaluated prompts of the same file name, two files of code, a copy of a corpus."""
    for name, text in {
        "train/files.jsonl": '{"prompt": "a"}\n',
        "eval/files.jsonl": '{"prompt": "b"}\n',
        "mine.py": "def own(images, prompts): return [0.0] * len(prompts)\n",
        "hue.py": "def hue(images, prompts): return [0.0] * len(prompts)\n",
        "data/gsm8k/test.jsonl": '{"question": "1 + 1?", "answer": "#### 2"}\n',
        "run.yaml": "# why\nmodel: {path: shapes}\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    written = {
        "model": {"path": "shapes"},
        "prompts": {"train": str(tmp_path / "train/files.jsonl"), "eval": str(tmp_path / "eval/files.jsonl")},
        "rewards": [f"{tmp_path}/mine.py:own", "jpeg_size"],
        "eval_rewards": [f"{tmp_path}/hue.py"],
    }
    (tmp_path / "run").mkdir()
    return lambda **prompts: config.validate({**written, "prompts": {**written["prompts"], **prompts}})


def test_the_files_of_a_run_are_copied_once_for_each_content(settings, tmp_path):
    run, chosen = tmp_path / "run", settings()
    for _ in range(2):  # the second time as a resume does
        assert inputs.keep(run, chosen, tmp_path / "run.yaml") == []
        assert list(listed(run)) == [
            ("config", "run.yaml"),
            ("prompts.train", "files-2.jsonl"),
            ("prompts.eval", "files-3.jsonl"),
            ("rewards.0.use", "mine.py"),
            ("eval_rewards.0.use", "hue.py"),
        ]
    assert (run / "inputs" / "run.yaml").read_text() == "# why\nmodel: {path: shapes}\n"
    assert (run / "inputs" / "files-3.jsonl").read_bytes() == (tmp_path / "eval/files.jsonl").read_bytes()
    line = listed(run)["rewards.0.use", "mine.py"]
    data = (tmp_path / "mine.py").read_bytes()
    assert line["sha256"] == sha256(data).hexdigest()
    assert (line["path"], line["bytes"]) == (str(tmp_path / "mine.py"), len(data))

    (tmp_path / "mine.py").write_text("def own(images, prompts): return [1.0] * len(prompts)\n")
    (said,) = inputs.keep(run, chosen, tmp_path / "run.yaml")
    assert said.startswith(f"rewards.0.use: {tmp_path}/mine.py has changed since the run began")
    assert "0.0" in (run / "inputs" / "mine.py").read_text()
    assert "1.0" in (run / "inputs" / "mine-2.py").read_text()
    assert list(listed(run))[-1] == ("rewards.0.use", "mine-2.py")


def test_a_corpus_is_kept_too_and_what_is_large_by_its_bytes_and_time_alone(settings, tmp_path, monkeypatch):
    corpus = tmp_path / "data/gsm8k/test.jsonl"
    os.utime(corpus, (0, 0))
    monkeypatch.setattr(inputs, "LARGEST", corpus.stat().st_size - 1)
    real, read = inputs._digest, []
    monkeypatch.setattr(inputs, "_digest", lambda path: read.append(path) or real(path))
    chosen = settings(eval="gsm8k:test", folder=str(tmp_path / "data"))
    inputs.keep(tmp_path / "run", chosen, None)
    kept = listed(tmp_path / "run")
    large = kept["prompts.eval", None]
    assert large["path"].endswith("data/gsm8k/test.jsonl")
    assert (large["sha256"], large["bytes"], large["modified"]) == (
        None, corpus.stat().st_size, "1970-01-01T00:00:00+00:00",
    )  # fmt: skip
    assert corpus not in read
    assert ("config", "run.yaml") not in kept
    assert sorted(path.name for path in (tmp_path / "run/inputs").iterdir()) == ["files-2.jsonl", "files.jsonl"]

    file = tmp_path / "run/inputs/files.jsonl"
    before = file.read_text()
    inputs.keep(tmp_path / "run", chosen, None)
    assert file.read_text() == before
    os.utime(corpus, (1, 1))
    assert inputs.keep(tmp_path / "run", chosen, None) == []  # no other bytes are known
    assert json.loads(file.read_text().removeprefix(before))["modified"] == "1970-01-01T00:00:01+00:00"


@pytest.fixture(scope="module")
def project(tiny_model, tmp_path_factory):
    """A folder with a run that was begun in it, whose config names everything relative to itself."""
    with furnished(tmp_path_factory.mktemp("begun"), tiny_model) as folder:
        shutil.copytree(tiny_model, folder / "model")
        file = folder / "tiny.yaml"
        written = yaml.safe_load(file.read_text())
        written["model"]["path"] = "model"
        file.write_text(yaml.safe_dump(written))
        assert main(["train", "tiny.yaml", "train.iterations=1"]) == 0
    return folder


@pytest.fixture
def begun(project, tmp_path, monkeypatch):
    """A copy of it, as if the run had begun there."""
    folder = shutil.copytree(project, tmp_path / "project", ignore=shutil.ignore_patterns("runs"))
    copy_run(project, folder)
    monkeypatch.chdir(folder)
    return folder


def test_a_run_goes_on_and_is_exported_from_another_folder(begun, monkeypatch, refused):
    assert list(listed(begun / "runs/t")) == [
        ("config", "tiny.yaml"),
        ("prompts.train", "prompts.txt"),
        ("prompts.eval", "prompts.txt"),
        ("rewards.0.use", "mine.py"),
    ]
    monkeypatch.chdir(begun.parent)
    assert main(["export", "project/runs/t", "--out", "lora"]) == 0
    again = ["train", "project/tiny.yaml", "train.iterations=2", "run.resume=true", "run.dir=project/runs"]
    assert main(again) == 0
    assert config.of_run(begun / "runs/t").model.path == "project/model"
    shutil.copy("project/prompts.txt", "other.txt")
    said = "run.resume: prompts.train was 'project/prompts.txt'"
    assert refused(*again, "prompts.train=other.txt").startswith(said)


def test_a_run_goes_on_where_its_folder_was_moved_to(begun, monkeypatch):
    begun.rename(begun.parent / "moved")
    monkeypatch.chdir(begun.parent / "moved")
    assert main(["train", "tiny.yaml", "train.iterations=2", "run.resume=true"]) == 0


def test_a_run_can_be_made_again_from_its_inputs(begun, printed):
    for name in ("tiny.yaml", "prompts.txt", "mine.py"):
        (begun / name).unlink()
    told = printed("plan", "runs/t/inputs/tiny.yaml", "run.name=again", "--full")
    assert "train: runs/t/inputs/prompts.txt" in told
