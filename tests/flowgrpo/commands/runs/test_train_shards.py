"""Runs that train all weights in shards: their checkpoints go on anywhere, and are there as a whole or not at all."""

import signal

import pytest
import torch
from conftest import furnished
from in_turn import Turn, after_first_step, trained_in_turn
from runs import background, from_shards, metrics, weights

from flowgrpo.cli import main

pytestmark = pytest.mark.zoo  # a plain run has the tests of checkpoints, in shards, too

OPTIONS = [
    "tiny.yaml",
    "model.call.num_inference_steps=2",
    "model.lora=null",
    "train.updates=1",
    "train.group_size=2",
    "train.ema=0.9",
    "train.optimizer.eps=1",  # steps along the gradient, however small a number of it is
    "train.learning_rate=1",
    "train.iterations=2",
    "eval={every: 2, prompts: 1, save: 0}",
    "run.checkpoint={every: 1, keep: 3}",
]
ALONE = ["run.processes=1", "run.sharding=none"]
SHARDED = ["run.processes=2", "run.sharding=fsdp2"]

# The second process is killed when its part of the second checkpoint is written and nothing sealed, or has no room for it.
DISTURBED = """
import os, resource, signal
from pathlib import Path
from flowgrpo.training.checkpoints import digests

def second():
    return os.environ.get("RANK") == "1" and Path("runs/t/checkpoints/step-000001").exists()

real = digests.hash_files
def hash_files(paths):
    if second() and Path("kill").exists():
        Path("kill").unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    return real(paths)
digests.hash_files = hash_files

def redness(images, prompts):
    if second() and Path("limit").exists():
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    return images[:, 0].mean((1, 2))
"""


def train(*options):
    process = background("train", *OPTIONS, "run.name=t", *SHARDED, *options)
    _, said = process.communicate(timeout=300)
    return process.returncode, said


def steps(run):
    return sorted(path.name for path in (run / "checkpoints").iterdir())


@pytest.fixture(scope="module")
def killed(tiny_model, tmp_path_factory):
    """A folder with a run whose second process was killed while it wrote; how it ended, and its checkpoints by then."""
    with furnished(tmp_path_factory.mktemp("killed"), tiny_model) as folder:
        (folder / "mine.py").write_text(DISTURBED)
        (folder / "kill").touch()
        status, said = train()
    return folder, status, said, steps(folder / "runs" / "t")


def in_turn(meet, *runs):
    """Let two processes make runs of these folders, names, sources and further options, one after the other."""
    config, *options = OPTIONS
    turns = [Turn(str(folder), config, name, [*options, *SHARDED, *own], source) for folder, name, source, *own in runs]
    assert trained_in_turn([turns], meet) == [{turn.name: [None, None] for turn in turns}]


@pytest.fixture(scope="module")
def whole(killed, tiny_model, tmp_path_factory):
    """A run that nobody disturbs; the run that was killed goes on, too, in its own folder."""
    with furnished(tmp_path_factory.mktemp("undisturbed"), tiny_model) as folder:
        in_turn(tmp_path_factory.mktemp("two"), (folder, "whole", None), (killed[0], "t", None, "run.resume=true"))
    return folder / "runs" / "whole"


def test_a_killed_process_leaves_the_checkpoint_before_whole_and_as_many_go_on_from_it_to_the_bit(killed, whole):
    folder, status, said, left = killed
    run = folder / "runs" / "t"
    assert status == 128 + signal.SIGKILL, said
    assert "process 1 of 2 was ended by SIGKILL; a checkpoint of step 1 is there, go on with: flowgrpo train" in said
    assert "flowgrpo: another process of this run has ended, so this one ends too" in said
    assert "step-000002" not in left
    assert steps(run) == ["step-000001", "step-000002"]
    one, two = (from_shards(folder / "checkpoints" / "step-000002") for folder in (whole, run))
    assert {name.partition(".")[0] for name in one} == {"weights", "moments"}
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert metrics(run, "eval")[-1]["reward/mean"] == metrics(whole, "eval")[-1]["reward/mean"]


def test_a_run_in_shards_goes_on_closely_in_more_processes_or_fewer(whole, tmp_path, monkeypatch):
    runs = whole.parent
    monkeypatch.chdir(runs.parent)
    assert main(["train", *OPTIONS, *ALONE, "run.name=first", "train.iterations=1"]) == 0
    in_turn(tmp_path, (runs.parent, "spread", "first"))
    after_first_step(runs, "whole", "alone")
    assert main(["train", *OPTIONS, *ALONE, "run.name=alone", "run.resume=true"]) == 0
    places = [runs / name / "checkpoints" / "step-000002" for name in ("whole", "alone", "spread")]
    assert [any(place.glob("shard-*")) for place in places] == [True, False, True]
    start, end = weights(whole, 1), weights(whole, 2)
    moved = sum(float((end[name] - start[name]).square().sum()) for name in end) ** 0.5
    for name in ("alone", "spread"):
        other = weights(runs / name, 2)
        apart = sum(float((end[key] - other[key]).square().sum()) for key in end) ** 0.5
        assert apart < 1e-4 * moved


def test_a_process_without_room_for_its_shards_ends_the_run_in_a_sentence(workplace):
    (workplace / "mine.py").write_text(DISTURBED)
    (workplace / "limit").touch()
    status, said = train("train.iterations=4")
    assert status == 1, said
    assert "Traceback" not in said
    (sentence,) = [line for line in said.splitlines() if "cannot be written to" in line]
    assert sentence.startswith("stopped, runs/t cannot be written to (File too large; ")
    # The first checkpoint may be sealed only after a reward was asked, which has its limit a step later then.
    there = steps(workplace / "runs" / "t")
    assert "step-000001" in there
    assert len(there) < 4
    last = int(there[-1].removeprefix("step-"))
    assert f"; a checkpoint of step {last} is there, go on, once there is room, with: flowgrpo train" in sentence
