"""One run at a time in a folder, whatever becomes of it."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest
import torch
import yaml

from flowgrpo import config
from flowgrpo.cli import main
from flowgrpo.errors import InputError
from flowgrpo.training import checkpoint, folders
from flowgrpo.training.weights import Weights


def test_a_held_folder_is_refused_and_free_afterwards(tmp_path):
    folder = tmp_path / "runs" / "a"
    with folders.held(folder):
        said = f"another run goes on in {folder}, process {os.getpid()}; wait for its end"
        with pytest.raises(InputError, match=said), folders.held(folder):
            pass
        (folder / "file").touch()
    with folders.held(folder):
        assert sorted(path.name for path in folder.iterdir()) == [folders.LOCK, "file"]
    assert [path.name for path in folder.iterdir()] == ["file"]


def test_a_folder_that_nothing_was_put_into_is_gone(tmp_path):
    with pytest.raises(KeyError), folders.held(tmp_path / "runs" / "a"):
        raise KeyError
    assert list(tmp_path.iterdir()) == []


def test_the_kernel_lets_go_of_a_killed_run(tmp_path):
    code = "import pathlib, sys, time; from flowgrpo.training import folders\n"
    code += "with folders.held(pathlib.Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code, tmp_path / "a"], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(InputError, match=f"process {other.pid};"), folders.held(tmp_path / "a"):
            pass
        other.send_signal(signal.SIGKILL)
    assert (tmp_path / "a" / folders.LOCK).exists()
    assert folders.is_empty(tmp_path / "a")  # to a new run it is as if nothing had been there
    with folders.held(tmp_path / "a"):
        pass


@pytest.mark.parametrize("parent", ["file", "/proc/no"])
def test_what_cannot_be_written_to_is_one_sentence(tmp_path, monkeypatch, parent):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    folder = type(tmp_path)(parent) / "a"
    with pytest.raises(InputError, match=rf"^run\.dir: {folder} cannot be written to \(.+\)$"), folders.held(folder):
        pass
    with pytest.raises(InputError, match=rf"^--out: {folder} cannot be written to \(.+\)$"):
        folders.check_writable(folder, "--out")
    folders.check_writable(tmp_path / "new" / "one", "--out")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.fixture
def unloaded(monkeypatch):
    """No model is loaded."""
    # The set-up first: it would keep a patched loader if it were imported after.
    for place in ("setup.policy_and_weights", "setup.load_policy", "pipeline.loading.load_policy"):
        monkeypatch.setattr(f"flowgrpo.flow.{place}", lambda *a, **k: pytest.fail("the model was loaded"))


@pytest.mark.parametrize("resume", ["false", "true"])
def test_a_second_run_in_a_folder_ends_with_status_2_before_its_model(workplace, unloaded, capsys, resume):
    with folders.held(workplace / "runs" / "t"):
        (workplace / "runs" / "t" / "config.yaml").write_text(yaml.safe_dump(config.load("tiny.yaml").model_dump()))
        assert main(["train", "tiny.yaml", f"run.resume={resume}"]) == 2
    said = f"flowgrpo: run.name: another run goes on in runs/t, process {os.getpid()}; wait for its end"
    assert capsys.readouterr().err.startswith(said)


def test_several_processes_are_not_even_started(workplace, monkeypatch, capsys):
    monkeypatch.setattr("flowgrpo.commands.launch.relaunch", lambda processes: pytest.fail("they were"))
    with folders.held(workplace / "runs" / "t"):
        assert main(["train", "tiny.yaml", "run.processes=2", "train.groups=4"]) == 2
    assert "another run goes on in runs/t" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "written", "said"),
    [
        ("metrics.jsonl", '{"step": 1}\n{"step": 2, "phase": "train"}\n', "metrics.jsonl:1: a line needs a step"),
        ("samples/manifest.jsonl", '{"file": \n{"file": "a", "prompt": "b"}\n', "manifest.jsonl:1: not valid JSON"),
        ("checkpoints/step-000001/state.json", "{", "step-000001/state.json: not valid JSON"),
        ("config.yaml", "a: &a [*a]", "config.yaml: not valid YAML (*a stands in what it stands for)"),
        ("metrics.jsonl", '{"step": 1, "phase": "eval"}\n', "metrics.jsonl is not of a run (KeyError('reward/mean'))"),
        ("samples/manifest.jsonl", '{"file": "a.png", "prompt": "b"}\n', "there is no file runs/t/samples/a.png"),
    ],
)
def test_a_resume_reads_everything_before_its_model(workplace, unloaded, capsys, file, written, said):
    folder = workplace / "runs" / "t"
    (folder / file).parent.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config.load("tiny.yaml").model_dump()))
    (folder / file).write_text(written)
    assert main(["train", "tiny.yaml", "run.resume=true"]) == 2
    told = capsys.readouterr().err
    assert said in told
    assert told.count("\n") == 1


def test_a_resume_reads_the_samples_before_its_model(workplace, unloaded, capsys):
    """At its first evaluation it would write a page of them."""
    samples = workplace / "runs" / "t" / "samples"
    samples.mkdir(parents=True)
    (samples.parent / "config.yaml").write_text(yaml.safe_dump(config.load("tiny.yaml").model_dump()))
    (samples / "manifest.jsonl").write_text('{"file": "a.png", "prompt": "b"}\n')
    (samples / "a.png").write_bytes(b"\x89PNG")
    assert main(["train", "tiny.yaml", "run.resume=true"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("flowgrpo: runs/t: ")
    assert "a.png" in told
    assert told.count("\n") == 1


DENSE = ["algorithm={preset: dense_grpo}", "train={group_size: 4, groups: 2, micro_batch: 4}", "run.resume=true"]
LINE = '{"step": 0, "phase": "calibration", "cost/model_evaluations": 1, "cost/decoded": 1, "time/calibration": 0.5}'


@pytest.mark.parametrize(
    "written",
    [
        "",
        "{",
        "[]",
        "[[]]",
        "3",
        '{"levels": [0.7]}',
        f'{{"levels": [], "metrics": {LINE}}}',
        f'{{"levels": 0.7, "metrics": {LINE}}}',
        f'{{"levels": ["a"], "metrics": {LINE}}}',
        f'{{"levels": [NaN], "metrics": {LINE}}}',
        f'{{"levels": [-0.7], "metrics": {LINE}}}',
        '{"levels": [0.7], "metrics": {}}',
        '{"levels": [0.7], "metrics": []}',
        f'{{"levels": [0.7], "metrics": {LINE.replace("0.5", "null")}}}',
    ],
)
def test_a_resume_reads_its_calibration_before_its_model(workplace, unloaded, capsys, written):
    folder = workplace / "runs" / "t"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config.load("tiny.yaml", DENSE).model_dump()))
    (folder / "calibration.json").write_text(written)
    assert main(["train", "tiny.yaml", *DENSE]) == 2
    told = capsys.readouterr().err
    assert re.match(r"flowgrpo: runs/t/calibration\.json(: not valid JSON| is not what a calibration writes)", told)
    assert told.count("\n") == 1
    (folder / "calibration.json").unlink()
    weights = Weights({"net": torch.nn.Linear(3, 2)}, None)
    optimizer, scaler = torch.optim.AdamW(weights.parameters), torch.amp.GradScaler("cpu", enabled=False)
    checkpoint.save(
        folder / "checkpoints",
        1,
        weights=weights,
        optimizer=optimizer,
        scaler=scaler,
        random_states=[checkpoint.random_state()],
        beta=0.0,
        prompt_stats={},
        keep=1,
    )
    assert main(["train", "tiny.yaml", *DENSE]) == 2
    assert "calibration.json is missing, which holds the noise levels" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:.*cut off, and left out")
def test_what_a_full_disk_cut_off_ends_no_command(workplace):
    """The last lines of metrics and manifest, in the middle of which the disk was full."""
    run = workplace / "runs" / "t"
    assert main(["train", "tiny.yaml", "train.iterations=1"]) == 0
    (run / "gallery.html").unlink()
    cut = {name: (run / name).read_text()[:-30] for name in ("metrics.jsonl", "samples/manifest.jsonl")}
    for name, text in cut.items():
        (run / name).write_text(text)
    assert main(["gallery", "runs/t"]) == 0
    assert main(["score", "jpeg_size", "--samples", "runs/t/samples"]) == 0
    assert main(["train", "tiny.yaml", "run.resume=true"]) == 0
    for name in cut:
        lines = [json.loads(line) for line in (run / name).read_text().splitlines()]
        assert {line["step"] for line in lines} == {0, 1, 2}
    assert (run / "gallery.html").stat().st_size > 0


COMMANDS = [
    ["sample", "shapes", "--prompt", "a"],
    ["sample", "digits", "--prompt", "1"],
    ["gallery", "runs/t"],
    ["export", "runs/t"],
    ["mdlm", "tracelock", "digits", "--prompts", "prompts.txt"],
]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_that_cannot_write_say_so_before_they_begin(workplace, monkeypatch, unloaded, capsys, command):
    for name in ("sampling.load_text_policy", "teach.load_predictor"):
        monkeypatch.setattr(f"flowgrpo.mdlm.{name}", lambda *a, **k: pytest.fail("the model was loaded"))
    run = workplace / "runs" / "t"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(yaml.safe_dump(config.load("tiny.yaml").model_dump()))
    (workplace / "file").touch()
    os.mkfifo(workplace / "fifo")
    os.symlink("circle", workplace / "circle")
    before = sorted(workplace.rglob("*"))
    for out in ("file/out/page", "a" * 300, "fifo", "circle/page", "/dev/null"):
        assert main([*command, "--out", out]) == 2
        told = capsys.readouterr().err
        assert out in told
        assert told.count("\n") == 1
    assert sorted(workplace.rglob("*")) == before


def test_a_gallery_replaces_a_file_and_no_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run" / "gallery.html").mkdir(parents=True)
    (tmp_path / "run" / "metrics.jsonl").touch()
    for arguments in ([], ["--out", "run"], ["--out", ""]):
        assert main(["gallery", "run", *arguments]) == 2
        said = "is there and no ordinary file; name one, such as gallery.html\n"
        assert capsys.readouterr().err.endswith(said)
    assert {path.name for path in tmp_path.rglob("*")} == {"run", "gallery.html", "metrics.jsonl"}
    (tmp_path / "page.html").write_text("old")
    assert main(["gallery", "run", "--out", "page.html"]) == 0
    assert (tmp_path / "page.html").read_text() != "old"


@pytest.mark.parametrize(
    "arguments",
    [["train"], ["plan"], ["doctor"], ["gallery"], ["sample", "--prompt", "a", "--out", "o"], ["export", "--out", "o"]],
)
def test_a_name_that_no_file_can_have_is_one_sentence(tmp_path, monkeypatch, capsys, arguments):
    monkeypatch.chdir(tmp_path)
    command, *options = arguments
    assert main([command, "a" * 300, *options]) == 2
    file = "a" * 300 + "/config.yaml" * (command == "export")
    assert capsys.readouterr().err == f"flowgrpo: {file} cannot be used (File name too long)\n"


def test_other_errors_of_the_file_system_keep_their_trace(monkeypatch):
    def missing():
        raise FileNotFoundError(2, "No such file or directory", "models.json")

    monkeypatch.setattr("flowgrpo.cli.app", lambda **k: missing())
    with pytest.raises(FileNotFoundError):
        main(["models"])


@pytest.mark.parametrize(
    ("kind", "file", "content"),
    [
        ("shapes", "pytorch_lora_weights.safetensors", b"\x40"),
        ("digits", "adapter_model.safetensors", b"\x40" + b"\0" * 7 + b"{"),
        ("digits", "adapter_config.json", b'{"r": '),
    ],
)
def test_an_adapter_that_was_cut_off_is_one_sentence_before_the_model(
    tmp_path, monkeypatch, unloaded, capsys, kind, file, content
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("flowgrpo.mdlm.sampling.load_text_policy", lambda *a: pytest.fail("the model was loaded"))
    (tmp_path / "adapter").mkdir()
    for name in ("pytorch_lora_weights.safetensors", "adapter_model.safetensors", "adapter_config.json"):
        (tmp_path / "adapter" / name).write_bytes(b"{}" if name.endswith(".json") else b"\x02" + b"\0" * 7 + b"{}")
    (tmp_path / "adapter" / file).write_bytes(content)
    assert main(["sample", kind, "--prompt", "a", "--out", "out", "--adapter", "adapter"]) == 2
    told = capsys.readouterr().err
    assert f"adapter/{file}" in told
    assert told.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["shapes", "digits"])
def test_half_a_character_in_a_prompt_is_one_sentence_before_the_model(tmp_path, monkeypatch, unloaded, capsys, kind):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("flowgrpo.mdlm.sampling.load_text_policy", lambda *a: pytest.fail("the model was loaded"))
    (tmp_path / "p.jsonl").write_text(r'{"prompt": "a \ud800"}')
    for asked, place in ((["--prompt", "a \udcff"], "--prompt"), (["--prompts", "p.jsonl"], "p.jsonl:1")):
        assert main(["sample", kind, *asked, "--out", "out"]) == 2
        assert capsys.readouterr().err.startswith(f"flowgrpo: {place}: the text 'a \\u")
