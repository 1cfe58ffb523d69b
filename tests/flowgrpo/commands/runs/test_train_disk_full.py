"""A disk that is full ends a run in one sentence, with its last whole checkpoint, and a resume goes on from that."""

import pytest
import torch
from conftest import furnished
from runs import background, metrics, weights

from flowgrpo.cli import main

OPTIONS = [
    "model.call.num_inference_steps=2",
    "train.iterations=3",
    "train.updates=1",
    "train.group_size=2",
    "run.checkpoint={every: 1, keep: 2}",
    "eval={every: 500, prompts: 2, save: 0}",
]

# No file may grow beyond a number of bytes from some call on; the first two calls are on synthetic samples, the third is in
# the first evaluation, and each iteration has two. The checkpoint before is written in the background until then.
LIMITED = """
import resource, time
from pathlib import Path
calls = []
def redness(images, prompts):
    calls.append(1)
    file = Path("limit")
    if file.exists() and len(calls) == 3 + 2 * 2 + 1:
        while not Path("runs/t/checkpoints/step-000002").is_dir():
            time.sleep(0.01)
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(file.read_text()),) * 2)
    return images[:, 0].mean((1, 2))
"""


@pytest.fixture(scope="module")
def whole(tiny_model, tmp_path_factory):
    """The folder of a run that had room."""
    with furnished(tmp_path_factory.mktemp("whole"), tiny_model) as folder:
        (folder / "mine.py").write_text(LIMITED)
        assert main(["train", "tiny.yaml", *OPTIONS, "run.name=whole"]) == 0
    return folder / "runs" / "whole"


def stopped(process):
    _, said = process.communicate(timeout=180)
    assert "Traceback" not in said, said
    assert process.returncode == 1, said
    (sentence,) = [line for line in said.splitlines() if "cannot be written to" in line]
    assert sentence.startswith("stopped, runs/t cannot be written to (File too large; ")
    assert "GiB are free); a checkpoint of step 2 is there, go on, once there is room, with: flowgrpo train" in sentence
    assert sentence.endswith("run.resume=true")


@pytest.mark.parametrize(
    ("file", "processes"),
    [
        ("checkpoints/step-000003/weights.safetensors", 1),
        pytest.param("checkpoints/step-000003/optimizer.pt", 1, marks=pytest.mark.zoo),
        ("metrics.jsonl", 1),
        pytest.param("metrics.jsonl", 2, marks=pytest.mark.zoo),
    ],
)
def test_a_run_without_room_ends_in_a_sentence_and_goes_on_when_there_is(workplace, whole, file, processes):
    options = [*OPTIONS, f"train.groups={2 * processes}", f"run.processes={processes}"]
    (workplace / "mine.py").write_text(LIMITED)
    run = workplace / "runs" / "t"
    size = (whole / file).stat().st_size
    lines = (whole / "metrics.jsonl").read_text().splitlines(True)
    limit = sum(map(len, lines[:3])) + 20 if file == "metrics.jsonl" else size - 1
    (workplace / "limit").write_text(str(limit))
    stopped(background("train", "tiny.yaml", *options))
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-000001", "step-000002"]
    (workplace / "limit").unlink()
    assert main(["train", "tiny.yaml", *options[:-1], "run.resume=true"]) == 0
    if processes == 1:
        again = weights(run, 3)
        assert all(torch.equal(tensor, again[name]) for name, tensor in weights(whole, 3).items())
    assert [line["step"] for line in metrics(run)] == [1, 2, 3]
