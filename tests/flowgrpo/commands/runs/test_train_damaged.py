"""A resume goes on from the newest checkpoint that is whole, and says which it passed over, and why."""

import pytest
import torch
from conftest import copy_run, furnished
from runs import metrics, weights

from flowgrpo.cli import main

OPTIONS = [
    "train.iterations=3",
    "train.updates=1",
    "train.group_size=2",
    "eval.prompts=2",
    "run.checkpoint={every: 1, keep: 3}",
]


def flip(path):
    written = bytearray(path.read_bytes())
    written[-200] ^= 16
    path.write_bytes(written)


def without_times(lines):
    return [{k: v for k, v in line.items() if not k.startswith(("time/", "memory/"))} for line in lines]


@pytest.fixture(scope="module")
def undamaged(tiny_model, tmp_path_factory):
    """A folder with a finished run of three checkpoints."""
    with furnished(tmp_path_factory.mktemp("undamaged"), tiny_model) as folder:
        assert main(["train", "tiny.yaml", *OPTIONS]) == 0
    return folder


@pytest.fixture
def run(workplace, undamaged):
    copy_run(undamaged, workplace)
    return workplace / "runs" / "t"


def test_a_damaged_newest_checkpoint_is_passed_over_with_a_warning(run, capfd):
    whole, lines = weights(run, 3), metrics(run)
    flip(run / "checkpoints" / "step-000003" / "optimizer.pt")
    (run / "checkpoints" / "step-000002" / "weights.safetensors").unlink()
    (run / "log.txt").unlink(missing_ok=True)
    assert main(["train", "tiny.yaml", *OPTIONS, "run.resume=true"]) == 0
    reasons = (
        "step-000003 cannot be loaded (ValueError: its optimizer.pt is not as it was written)",
        "step-000002 cannot be loaded (ValueError: its weights.safetensors is missing)",
        "; the run goes on from step 1",
    )
    said = " ".join(capfd.readouterr().err.split())  # a terminal may break lines
    (logged,) = (run / "log.txt").read_text().splitlines()
    page = (run / "gallery.html").read_text()
    for reason in reasons:
        assert said.count(reason) == logged.count(reason) == 1
        assert reason.removesuffix(")") in page
    assert without_times(metrics(run)) == without_times(lines)
    again = weights(run, 3)
    assert again.keys() == whole.keys()
    assert all(torch.equal(tensor, again[name]) for name, tensor in whole.items())


def test_without_a_whole_checkpoint_a_resume_ends_with_status_2_and_takes_nothing_away(run, unloaded, refused):
    for step in (1, 2, 3):
        flip(run / "checkpoints" / f"step-00000{step}" / "optimizer.pt")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    said = refused("train", "tiny.yaml", *OPTIONS, "run.resume=true")
    assert said.startswith("run.resume: no checkpoint is whole (runs/t/checkpoints/step-000003 cannot be loaded ")
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_a_checkpoint_that_was_asked_for_is_refused_and_none_is_taken_in_its_place(run, refused):
    flip(run / "checkpoints" / "step-000002" / "weights.safetensors")
    said = refused("export", "runs/t", "--step", "2", "--out", "made")
    assert "step-000002 cannot be loaded (ValueError: its weights.safetensors is not as it was written)" in said
    assert main(["export", "runs/t", "--step", "1", "--out", "made"]) == 0
