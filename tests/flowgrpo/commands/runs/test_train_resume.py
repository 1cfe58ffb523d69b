"""One run at a time in a folder, and a resume that goes on as it began and reads all that it needs before its model."""

import json
import os
import re
import signal
import time

import pytest
import torch
import yaml
from runs import background, metrics, wait_for, weights

from flowgrpo import config
from flowgrpo.cli import main
from flowgrpo.training.checkpoints import snapshot
from flowgrpo.training.run import random_states, run_folder
from flowgrpo.training.weights.trained_weights import Weights


def begin(run, *overrides):
    """Write the config of a run that has only begun."""
    run.mkdir(parents=True, exist_ok=True)
    (run / "config.yaml").write_text(yaml.safe_dump(config.load("tiny.yaml", [*overrides]).model_dump()))
    return run


@pytest.mark.parametrize("options", [["run.resume=false"], ["run.resume=true"], ["run.processes=2", "train.groups=4"]])
def test_a_second_run_in_a_folder_ends_with_status_2_before_its_model_or_other_processes(
    workplace, unloaded, monkeypatch, refused, options
):
    monkeypatch.setattr("flowgrpo.commands.launch.relaunch", lambda processes, folder: pytest.fail("they were started"))
    with run_folder.lock_folder(workplace / "runs" / "t"):
        begin(workplace / "runs" / "t")
        said = f"run.name: process {os.getpid()} is still running in runs/t; wait for its end"
        assert refused("train", "tiny.yaml", *options).startswith(said)


@pytest.mark.parametrize(
    ("file", "written", "said"),
    [
        ("metrics.jsonl", '{"step": 1}\n{"step": 2, "phase": "train"}\n', "metrics.jsonl:1: a line needs a step"),
        ("samples/manifest.jsonl", '{"file": \n{"file": "a", "prompt": "b"}\n', "manifest.jsonl:1: not valid JSON"),
        ("checkpoints/step-000001/state.json", "{", "step-000001/state.json: not valid JSON"),
        ("config.yaml", "a: &a [*a]", "config.yaml: not valid YAML (*a stands in what it stands for)"),
        ("metrics.jsonl", '{"step": 1, "phase": "eval"}\n', "metrics.jsonl is not of a run (KeyError('reward/mean'))"),
        ("samples/manifest.jsonl", '{"file": "a.png", "prompt": "b"}\n', "there is no file runs/t/samples/a.png"),
        ("samples/manifest.jsonl", '{"file": "b.png", "prompt": "b"}\n', "samples/b.png cannot be read"),
    ],
)
def test_a_resume_reads_everything_before_its_model(workplace, unloaded, refused, file, written, said):
    """At its first evaluation it would write a page of the samples."""
    folder = begin(workplace / "runs" / "t")
    (folder / file).parent.mkdir(parents=True, exist_ok=True)
    (folder / file).write_text(written)
    (folder / "samples").mkdir(exist_ok=True)
    (folder / "samples" / "b.png").write_bytes(b"\x89PNG")
    assert said in refused("train", "tiny.yaml", "run.resume=true")


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
def test_a_resume_reads_its_calibration_before_its_model(workplace, unloaded, refused, written):
    folder = begin(workplace / "runs" / "t", *DENSE)
    (folder / "calibration.json").write_text(written)
    said = refused("train", "tiny.yaml", *DENSE)
    assert re.match(r"runs/t/calibration\.json(: not valid JSON| is not what a calibration writes)", said)
    (folder / "calibration.json").unlink()
    weights = Weights({"net": torch.nn.Linear(3, 2)}, None)
    optimizer, scaler = torch.optim.AdamW(weights.parameters), torch.amp.GradScaler("cpu", enabled=False)
    taken = snapshot.take(
        1,
        weights=weights,
        optimizer=optimizer,
        scaler=scaler,
        random_states=[random_states.random_state()],
        beta=0.0,
        prompt_stats={},
    )
    snapshot.write(folder / "checkpoints", taken, keep=1)
    assert "calibration.json is missing, which holds the noise levels" in refused("train", "tiny.yaml", *DENSE)


@pytest.mark.filterwarnings("ignore:.*cut off, and left out")
def test_what_a_full_disk_cut_off_ends_no_command(trained):
    """The last lines of metrics and manifest, in the middle of which the disk was full."""
    run = trained / "runs" / "t"
    (run / "gallery.html").unlink()
    cut = {name: (run / name).read_text()[:-30] for name in ("metrics.jsonl", "samples/manifest.jsonl")}
    for name, text in cut.items():
        (run / name).write_text(text)
    assert main(["gallery", "runs/t"]) == 0
    assert main(["score", "jpeg_size", "--samples", "runs/t/samples"]) == 0
    assert main(["train", "tiny.yaml", "run.resume=true", "train.iterations=3"]) == 0
    for name in cut:
        lines = [json.loads(line) for line in (run / name).read_text().splitlines()]
        assert {line["step"] for line in lines} == {0, 1, 2, 3}
    assert (run / "gallery.html").stat().st_size > 0


@pytest.mark.parametrize("options", [[], ["run.processes=2", "train.groups=4"]])
def test_an_existing_run_is_not_overwritten(trained, monkeypatch, refused, options):
    monkeypatch.setattr("flowgrpo.commands.launch.relaunch", lambda processes, folder: pytest.fail("they were started"))
    assert "runs/t exists already; set run.resume=true to continue it, or another run.name" in refused(
        "train", "tiny.yaml", *options
    )


def test_several_processes_are_not_started_for_another_run(trained, monkeypatch, refused):
    monkeypatch.setattr("flowgrpo.commands.launch.relaunch", lambda processes, folder: pytest.fail("they were started"))
    said = refused("train", "tiny.yaml", "run.processes=2", "run.resume=auto", "train.groups=8")
    assert re.match(r"run.resume: train.groups was \d+ in runs/t and is 8 now", said)


DYING = """
import os, signal
from pathlib import Path
def redness(images, prompts):
    if Path("die").exists() and Path("runs/killed/checkpoints/step-000001").exists():
        Path("die").unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    return images[:, 0].mean((1, 2))
"""


def test_three_iterations_equal_one_and_a_kill_and_two(workplace):
    steps = ["train.iterations=3", "model.call.num_inference_steps=2", "train.updates=1", "eval.prompts=2"]
    (workplace / "mine.py").write_text(DYING)
    assert main(["train", "tiny.yaml", *steps, "run.name=whole"]) == 0
    run = workplace / "runs" / "killed"
    (workplace / "die").touch()
    process = background("train", "tiny.yaml", *steps, "run.name=killed")
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert main(["train", "tiny.yaml", *steps, "run.name=killed", "run.resume=true"]) == 0
    whole, resumed = weights(workplace / "runs" / "whole", 3), weights(run, 3)
    assert whole.keys() == resumed.keys()
    for name, tensor in whole.items():
        assert torch.equal(tensor, resumed[name]), name
    assert [line["step"] for line in metrics(run)] == [1, 2, 3]
    files = [json.loads(line)["file"] for line in (run / "samples" / "manifest.jsonl").read_text().splitlines()]
    assert len(files) == len(set(files)) == 4 * 2


def wait_for_a_step(path, process):
    """Before it, there is nothing to write a checkpoint of."""
    wait_for(path, process)
    while '"train"' not in path.read_text() and process.poll() is None:
        time.sleep(0.05)


@pytest.mark.parametrize("sent", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.zoo)])
def test_an_interruption_finishes_the_step_and_says_how_to_go_on(workplace, sent):
    process = background("train", "tiny.yaml", "train.iterations=500", "run.checkpoint.every=500", "eval.every=500")
    wait_for_a_step(workplace / "runs" / "t" / "metrics.jsonl", process)
    process.send_signal(sent)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "go on with: flowgrpo train tiny.yaml train.iterations=500" in said
    assert said.rstrip().endswith("run.resume=true")
    assert "Traceback" not in said
    run = workplace / "runs" / "t"
    last = metrics(run)[-1]["step"]
    assert [path.name for path in (run / "checkpoints").iterdir()] == [f"step-{last:06d}"]
    assert (run / "gallery.html").read_text().count("<figure") == 2  # of the one evaluation there was
