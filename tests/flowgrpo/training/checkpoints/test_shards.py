"""Tensors in shards are plain safetensors, and are read without being in memory twice."""

from functools import partial

import pytest
import torch
from in_checkpoints import LAYERS, WIDTH, memory_beside, save_large
from pair import pair
from safetensors.torch import load_file

from flowgrpo.training.checkpoints import shards
from flowgrpo.training.distributed.agreement import Peers

SIZE = 4 * LAYERS * WIDTH**2


@pytest.mark.parametrize("form", ["fsdp2", None])
def test_a_model_is_read_part_by_part_and_never_held_twice(tmp_path, form):
    checkpoints = tmp_path / "checkpoints"
    if form is None:
        save_large(0, checkpoints, "none")
    else:
        (tmp_path / "save").mkdir()
        assert pair(partial(save_large, folder=checkpoints), tmp_path / "save") == [None, None]
    (tmp_path / "read").mkdir()
    ((grown, right),) = pair(partial(memory_beside, folder=checkpoints), tmp_path / "read", processes=1)
    assert right
    assert grown < SIZE / 8


def test_files_are_told_from_others_and_from_each_other(tmp_path):
    shards.write(tmp_path, {"a": torch.arange(3.0), "b.c": torch.ones(2, 2)}, Peers())
    for name in ("optimizer.pt", "shard-1.safetensors", "weights.safetensors"):
        (tmp_path / name).touch()
    (file,) = shards.files(tmp_path)
    assert file.name == "shard-00001-model-00001-of-00001.safetensors"
    assert load_file(file).keys() == {"a", "b.c"}
    assert shards.writer(file) == 0
    assert shards.writer(file.with_name("shard-00012-model-00001-of-00001.safetensors")) == 11
    assert shards.writer(tmp_path / "optimizer.pt") == 0


def test_no_file_is_larger_than_a_part_but_for_the_tensors_that_are(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "PART", 16)
    tensors = {"a": torch.arange(2.0), "b": torch.ones(2), "c": torch.ones(1), "d": torch.ones(9), "e": torch.zeros(1)}
    shards.write(tmp_path, tensors, Peers())
    assert [[*load_file(file)] for file in shards.files(tmp_path)] == [["a", "b"], ["c"], ["d"], ["e"]]
    assert {shards.writer(file) for file in shards.files(tmp_path)} == {0}
    target = {name: torch.full_like(tensor, 7) for name, tensor in tensors.items()}
    shards.read(tmp_path, target)
    assert all(torch.equal(target[name], tensor) for name, tensor in tensors.items())


def test_what_is_not_there_or_has_another_shape_is_refused(tmp_path):
    shards.write(tmp_path, {"a": torch.arange(3.0)}, Peers())
    assert shards.shapes(tmp_path) == {"a": torch.Size([3])}
    with pytest.raises(RuntimeError, match="Missing key in checkpoint state_dict: b"):
        shards.read(tmp_path, {"b": torch.zeros(3)})
    with pytest.raises(ValueError, match="Size mismatch"):
        shards.read(tmp_path, {"a": torch.zeros(4)})
    target = torch.zeros(3)
    shards.read(tmp_path, {"a": target})
    assert target.tolist() == [0, 1, 2]
