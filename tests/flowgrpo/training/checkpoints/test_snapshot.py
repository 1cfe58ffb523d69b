"""What is written is what stood when the snapshot was taken; in shards each process writes its own part."""

import json
import shutil
import threading
from functools import partial

import pytest
import torch
from in_checkpoints import held, load, loaded, save, spoil, taken, trained, without_room
from in_shards import learning
from in_turn import each_in_turn
from runs import from_shards

from flowgrpo.errors import InputError
from flowgrpo.training.checkpoints import checkpoint, snapshot
from flowgrpo.training.checkpoints.snapshot import Writer
from flowgrpo.training.distributed.agreement import Peers
from flowgrpo.training.run.background import Background
from flowgrpo.training.weights.trained_weights import Weights


def same(one, other):
    torch.testing.assert_close(one, other, rtol=0, atol=0)


def failing(*options):
    raise OSError(28, "full")


def among(functions, folder, processes):
    """What functions of a rank and a folder of checkpoints return in each of some processes, by name."""
    own = {name: partial(function, folder=folder / name) for name, function in functions.items()}
    (folder / f"of {processes}").mkdir()
    return each_in_turn(own, folder / f"of {processes}", processes=processes)


@pytest.fixture(scope="module")
def of_two(tmp_path_factory):
    """A folder in which two processes have written and read checkpoints, and what they held."""
    folder = tmp_path_factory.mktemp("two")
    whole = save(0, folder / "whole", None)
    (folder / "again").symlink_to(folder / "sharded")
    functions = {"sharded": save, "again": load, "whole": load, "without room": without_room}
    return folder, whole, among(functions, folder, 2)


@pytest.fixture(scope="module")
def sharded(of_two):
    """A folder with a checkpoint in two shards, and what it holds."""
    folder, _, found = of_two
    zero, one = found["sharded"]
    same(zero, one)
    return folder / "sharded", zero


def test_a_checkpoint_in_shards_has_a_file_of_each_process_and_no_whole_tensors(sharded):
    folder, before = sharded
    place = folder / "step-000001"
    parts = [f"shard-0000{number}-model-00001-of-00001.safetensors" for number in (1, 2)]
    assert sorted(path.name for path in place.iterdir()) == ["optimizer.pt", "random.pt", *parts, "state.json"]
    assert json.loads((place / "state.json").read_text())["files"].keys() == {"optimizer.pt", "random.pt", *parts}
    small, large = sorted((place / part).stat().st_size for part in parts)
    assert large < 1.5 * small
    written = {k[8:]: v for k, v in from_shards(place).items() if k.startswith("weights.")}
    same(written, before["weights"])


@pytest.mark.parametrize("processes", [2, 3])
def test_shards_are_read_to_the_bit_on_as_many_processes_and_on_others(of_two, sharded, tmp_path, processes):
    folder, before = sharded
    (tmp_path / "again").symlink_to(folder)
    found = of_two[2] if processes == 2 else among({"again": load}, tmp_path, processes)
    for each in (*found["again"], loaded(folder, None)):  # the last by one process without shards
        same(each, before)


def test_a_whole_checkpoint_is_read_into_shards_to_the_bit(of_two):
    folder, before, found = of_two
    names = ["optimizer.pt", "random.pt", "state.json", "versions.safetensors", "weights.safetensors"]
    assert sorted(path.name for path in (folder / "whole" / "step-000001").iterdir()) == names
    for each in (*found["whole"], loaded(folder / "whole", None)):
        same(each, before)


def test_of_machines_that_hold_the_same_shards_one_writes_them(tmp_path):
    before = among({"hsdp": partial(save, form="hsdp")}, tmp_path, 4)["hsdp"][0]
    assert len([*(tmp_path / "hsdp" / "step-000001").glob("shard-*")]) == 2
    same(loaded(tmp_path / "hsdp", None), before)


def test_a_process_without_room_ends_the_writing_on_all_and_leaves_what_was_there(of_two):
    for said, left in of_two[2]["without room"]:
        assert said == "[Errno 27] File too large"
        assert left == ["step-000001"]


@pytest.fixture
def copied(sharded, tmp_path):
    """A copy of the checkpoint in shards, that may be damaged."""
    return shutil.copytree(sharded[0] / "step-000001", tmp_path / "step-000001")


@pytest.mark.parametrize("number", [1, 2])
def test_a_shard_that_has_changed_or_is_gone_is_one_sentence(copied, number):
    shard = copied / f"shard-0000{number}-model-00001-of-00001.safetensors"
    written = bytearray(shard.read_bytes())
    written[-1] ^= 1
    shard.write_bytes(written)
    with pytest.raises(InputError, match=f"its shard-0000{number}-model.* is not as it was written"):
        checkpoint.check(copied)
    shard.unlink()
    with pytest.raises(InputError, match=f"its shard-0000{number}-model.* is missing"):
        checkpoint.check(copied)


def test_shards_of_another_model_are_one_sentence(copied):
    weights = Weights({"net1": torch.nn.Linear(4, 4)}, None)
    with pytest.raises(InputError, match="the checkpoint's weights are not of this model"):
        checkpoint.load_weights(copied, weights)


def test_what_evaluation_used_is_read_in_the_place_of_what_is_trained(of_two, sharded):
    folder, whole, _ = of_two
    for place, before in (sharded, (folder / "whole", whole)):
        weights = Weights(learning(), None)
        assert checkpoint.load_averaged(checkpoint.find(place), weights) == 1
        same(weights.tensors(), {k[8:]: v for k, v in before["weights"].items() if k.startswith("average.")})


def test_the_next_checkpoint_waits_for_the_one_before_and_gets_its_error(tmp_path, monkeypatch):
    may, real = threading.Event(), snapshot._write_whole
    monkeypatch.setattr(snapshot, "_write_whole", lambda *options: may.wait(60) and real(*options))
    parts = trained(None)
    before = held(*parts)
    with pytest.raises(OSError, match="full"), Background() as background:  # noqa: PT012
        writer = Writer(tmp_path, background, keep=2, peers=Peers())
        writer.wait()
        writer.begin(taken(*parts), lambda: True)
        spoil(*parts[:2])
        assert checkpoint.steps(tmp_path) == []
        held_up = threading.Event()
        background.submit(lambda: held_up.wait(20) or failing())  # of what comes later nothing is waited for
        may.set()
        writer.wait()
        held_up.set()
        assert checkpoint.steps(tmp_path) == [1]
        same(loaded(tmp_path, None), before)
        monkeypatch.setattr(snapshot, "_write_whole", failing)
        writer.begin(taken(*parts, step=2), lambda: True)
        with pytest.raises(OSError, match="full"):
            writer.wait()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000001"]
