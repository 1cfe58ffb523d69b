"""A process of several is killed: the others end, the launcher says how to go on, and that is the run that nobody killed."""

import json
import re
import signal
import time

import forked
import psutil
import pytest
import torch
from conftest import furnished
from runs import background, metrics, wait_for, weights

from flowgrpo.cli import main

OPTIONS = [
    "model.call.num_inference_steps=2",
    "train.updates=1",
    "train.iterations=3",
    "run.processes=2",
    "eval={every: 3, prompts: 1, save: 0}",
]

# A plug-in that kills its process in a part of the second iteration, if nobody was killed before.
DYING = """
import os, signal, time
from pathlib import Path
from flowgrpo.flow.trainer import FlowWing
from flowgrpo.training.checkpoints import snapshot
from flowgrpo.training.scoring import scorer

def die():
    if os.environ["RANK"] == os.environ["DIES"] and not Path("died").exists():
        if Path("runs/t/checkpoints/step-000001").exists():
            Path("died").touch()
            os.kill(os.getpid(), signal.SIGKILL)

def dying(owner, name):
    own = getattr(owner, name)
    def call(*args, **kwargs):
        die()
        return own(*args, **kwargs)
    setattr(owner, name, call)

if "DIES" in os.environ:
    where = {"rollout": (FlowWing, "rollout"), "update": (FlowWing, "take_step"), "checkpoint": (snapshot, "_write")}
    if os.environ["IN"] in where:
        dying(*where[os.environ["IN"]])

def redness(images, prompts):
    if os.environ.get("IN") == "reward":
        die()
    metrics = Path("runs/t/metrics.jsonl")
    if os.environ.get("IN") == "waits" and metrics.exists() and '"step": 1,' in metrics.read_text():
        while not Path("told").exists():
            time.sleep(0.02)
        time.sleep(1)  # until the launcher has passed the signal on
    return images[:, 0].mean((1, 2))
"""


@pytest.fixture
def run(workplace):
    (workplace / "mine.py").write_text(DYING)
    return workplace / "runs" / "t"


@pytest.fixture(scope="module")
def whole(tiny_model, tmp_path_factory):
    """The folder of the run that nobody kills."""
    with furnished(tmp_path_factory.mktemp("whole"), tiny_model) as folder:
        (folder / "mine.py").write_text(DYING)
        process = background("train", "tiny.yaml", *OPTIONS)
    _, said = process.communicate(timeout=180)
    assert process.returncode == 0, said
    return folder / "runs" / "t"


def same(run, whole):
    assert weights(run, 3).keys() == weights(whole, 3).keys()
    assert all(torch.equal(tensor, weights(run, 3)[name]) for name, tensor in weights(whole, 3).items())
    one, two = (
        [{k: v for k, v in m.items() if k[:5] not in ("time/", "memor")} for m in metrics(x)] for x in (run, whole)
    )
    assert one == two
    assert [line["step"] for line in one] == [1, 2, 3]


@pytest.mark.parametrize(
    ("part", "rank", "asked"),
    [
        pytest.param("rollout", 0, "true", marks=pytest.mark.zoo),
        pytest.param("reward", 1, "auto", marks=pytest.mark.zoo),
        pytest.param("update", 1, "true", marks=pytest.mark.zoo),
        ("checkpoint", 0, "auto"),
    ],
)
def test_a_killed_process_ends_the_run_in_a_sentence_and_a_resume_is_the_undisturbed_run(run, whole, part, rank, asked):
    """With auto the command is the same each time."""
    again = [*OPTIONS, f"run.resume={asked}"]
    process = background("train", "tiny.yaml", *(again if asked == "auto" else OPTIONS), DIES=str(rank), IN=part)
    _, said = process.communicate(timeout=180)
    assert process.returncode == 128 + signal.SIGKILL, said
    assert "Traceback" not in said
    # Which checkpoint is written by then is for the disk to say: the run goes on while it is.
    ended = f"process {rank} of 2 was ended by SIGKILL; a checkpoint of step [12] is there, go on with: flowgrpo train "
    assert re.match(ended, said.splitlines()[-1])
    assert said.rstrip().endswith(f"run.resume={asked}")
    if rank:
        assert "flowgrpo: another process of this run has ended, so this one ends too" in said
    process = background("train", "tiny.yaml", *again)
    _, said = process.communicate(timeout=180)
    assert process.returncode == 0, said
    same(run, whole)


def torchrun(*options, **environment):
    """A run of two processes under torchrun."""
    words = ["--standalone", "--nproc-per-node", "2", *options, "-m", "flowgrpo", "train", "tiny.yaml", *OPTIONS]
    return forked.Command(words, {"GLOO_SOCKET_IFNAME": "lo", **environment}, run=forked.torchrun)


@pytest.mark.zoo
def test_a_run_that_torchrun_starts_again_goes_on_from_its_checkpoint(run, whole):
    process = torchrun("--max-restarts", "3", DIES="1", IN="update", TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    _, said = process.communicate(timeout=300)
    assert process.returncode == 0, said
    assert (run.parents[1] / "died").exists()
    same(run, whole)


@pytest.mark.zoo
def test_a_sigterm_to_torchrun_finishes_the_step_and_writes_a_checkpoint(run, whole):
    process = torchrun(TORCH_ELASTIC_SHUTDOWN_TIMEOUT="120", IN="waits")
    wait_for(run / "checkpoints" / "step-000001", process)
    process.send_signal(signal.SIGTERM)
    (run.parents[1] / "told").touch()
    _, said = process.communicate(timeout=300)
    assert "go on with: accelerate launch --multi_gpu --num_processes 2 -m flowgrpo train tiny.yaml" in said
    last = metrics(run)[-1]["step"]
    assert last < 3
    assert (run / "checkpoints" / f"step-{last:06d}").is_dir()
    again = background("train", "tiny.yaml", *OPTIONS, "run.resume=true")
    _, said = again.communicate(timeout=180)
    assert again.returncode == 0, said
    same(run, whole)


def test_a_killed_launcher_takes_its_processes_with_it_after_their_step(run):
    """Nobody else would end them, and they would hold the folder."""
    process = background("train", "tiny.yaml", *OPTIONS, "train.iterations=500", "run.checkpoint.every=500")
    wait_for(run / "metrics.jsonl", process)
    while not metrics(run):
        time.sleep(0.02)
    ranks = psutil.Process(process.pid).children()
    assert len(ranks) == 2
    process.kill()
    _, running = psutil.wait_procs(ranks, 60)
    assert not running
    last = metrics(run)[-1]["step"]
    assert [path.name for path in (run / "checkpoints").iterdir()] == [f"step-{last:06d}"]


@pytest.mark.parametrize(
    ("environment", "begun_by", "again"),
    [
        ({}, None, False),
        ({"TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_RUN_ID": "none"}, "none", False),
        ({"TORCHELASTIC_RESTART_COUNT": "1", "TORCHELASTIC_RUN_ID": "none"}, None, True),
        ({"TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_RUN_ID": "job7"}, "job7", True),  # on a machine that is new
        ({"TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_RUN_ID": "job8"}, "job7", False),
    ],
)
def test_torchrun_goes_on_with_a_run_that_it_has_begun_and_with_no_other(
    trained, monkeypatch, capsys, environment, begun_by, again
):
    place = trained / "runs" / "t" / "environment.json"
    place.write_text(json.dumps(json.loads(place.read_text()) | {"torchrun": begun_by}))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main(["train", "tiny.yaml"]) == (0 if again else 2)
    assert (
        "runs/t exists already; set run.resume=true to continue it, or another run.name" in capsys.readouterr().err
    ) is not again
