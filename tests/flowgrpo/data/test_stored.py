"""Folders of groups: what was stored is read, a folder that was cut off is gone on with, and none is read by halves."""

import json

import pytest
import shelf
import torch
from safetensors.torch import load_file

from flowgrpo.data import stored
from flowgrpo.data.prompts import Prompt
from flowgrpo.errors import InputError


def latents(*numbers):
    """A state of two tensors for each number."""
    values = torch.tensor(numbers, dtype=torch.float32)
    halves = (values[:, None, None] / 2).expand(-1, 2, 2).to(torch.bfloat16)
    return values[:, None].expand(-1, 3).clone(), halves.clone()


def three():
    return [
        (shelf.group("a", [[1.0, 0.5], [float("nan"), 2.0]], task="draw", boxes=[[0, None]]), latents(1, 2)),
        (shelf.group("b", [[3.0, 1.0], [4.0, 1.0], [5.0, 1.0]], first_seed=2**63 - 3, lost=[1]), latents(3, 4, 5)),
        (shelf.group("a", [[6.0, 0.0], [7.0, 0.0]]), latents(6, 7)),
    ]


def test_groups_are_read_as_they_were_stored(tmp_path):
    shelf.write(tmp_path / "o", three(), ("one", "two"), model="m")
    found = stored.read(tmp_path / "o")
    assert (found.rewards, found.manifest["model"]) == (["one", "two"], "m")
    for kept, (group, _) in zip(found.groups, three(), strict=True):
        assert kept.prompt == group.prompt
        assert kept.prompt.columns == group.prompt.columns
        assert kept.seeds == group.seeds
        torch.testing.assert_close(kept.rewards, group.rewards, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(kept.lost, group.lost)
    assert found.groups[0].prompt == Prompt("a", {"task": "draw", "boxes": [[0, None]]})
    state = found.latents([(2, 1), (0, 0), (1, 2), (2, 1)])
    for got, wanted in zip(state, latents(7, 1, 5, 7), strict=True):
        assert got.dtype == wanted.dtype
        assert torch.equal(got, wanted)


def test_files_are_cut_by_size_and_the_table_says_where_a_sample_lies(tmp_path, monkeypatch):
    monkeypatch.setattr(stored, "SHARD", 1)
    writer = stored.Writer(tmp_path / "o", dict.fromkeys(("model", "fingerprint", "dtype", "call")), ("one", "two"))
    for each in three():
        writer.add([each])
    manifest = writer.finish({})
    assert list(manifest["files"]) == [f"latents-{i:05d}.safetensors" for i in range(3)]
    files = sorted(path.name for path in (tmp_path / "o").iterdir())
    assert files == ["groups.parquet", *manifest["files"], "manifest.json"]
    assert len(load_file(tmp_path / "o" / "latents-00001.safetensors")["latents.00"]) == 3
    found = stored.read(tmp_path / "o")
    assert found.latents([(2, 0), (0, 1), (1, 1)])[0][:, 0].tolist() == [6, 2, 4]


@pytest.mark.parametrize("cut", ["before the table", "after the table", "before the manifest"])
def test_a_folder_that_was_cut_off_is_gone_on_with(tmp_path, monkeypatch, cut):
    monkeypatch.setattr(stored, "SHARD", 1)
    whole, folder = tmp_path / "whole", tmp_path / "cut"
    writer = stored.Writer(whole, {"seed": 3}, ("one", "two"))
    for each in three():
        writer.add([each])
    writer.finish({"sigmas": [1.0, 0.0]})

    writer = stored.Writer(folder, {"seed": 3}, ("one", "two"))
    for each in three()[: 3 if cut == "before the manifest" else 2]:
        writer.add([each])
    if cut == "before the table":
        (folder / "part-00001.parquet").rename(folder / "part-00001.parquet.partial")
    with pytest.raises(
        InputError, match=r"cut was cut off before it was whole; repeat the command flowgrpo sample that began it"
    ):
        stored.read(folder)
    again = stored.Writer(folder, {"seed": 3}, ("one", "two"))
    assert again.done == {"before the table": 1, "after the table": 2, "before the manifest": 3}[cut]
    for each in three()[again.done :]:
        again.add([each])
    again.finish({"sigmas": [1.0, 0.0]})
    for path in whole.iterdir():
        assert (folder / path.name).read_bytes() == path.read_bytes(), path.name


def test_a_folder_is_not_gone_on_with_by_another_command(tmp_path):
    stored.Writer(tmp_path / "o", {"seed": 3, "call": {"height": 8}}, ("one",)).add(three()[:0])
    with pytest.raises(InputError, match=r'was begun with call {"height": 8}, which is {"height": 9} now'):
        stored.Writer(tmp_path / "o", {"seed": 3, "call": {"height": 9}}, ("one",))
    with pytest.raises(InputError, match=r'was begun with rewards \["one"\], which is \["two"\] now'):
        stored.Writer(tmp_path / "o", {"seed": 3, "call": {"height": 8}}, ("two",))


def test_a_whole_folder_and_one_of_other_things_are_not_written_to(tmp_path):
    shelf.write(tmp_path / "o", three(), ("one", "two"))
    with pytest.raises(InputError, match=r"holds groups already \(manifest.json\)"):
        stored.Writer(tmp_path / "o", {}, ("one", "two"))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").touch()
    with pytest.raises(InputError, match="holds other files"):
        stored.Writer(tmp_path / "other", {}, ("one", "two"))


def test_a_folder_that_is_not_whole_is_one_sentence(tmp_path):
    with pytest.raises(InputError, match=r"^data\.groups: .*nowhere holds no groups, it has no manifest\.json"):
        stored.read(tmp_path / "nowhere")
    shelf.write(tmp_path / "o", three(), ("one", "two"))
    file = tmp_path / "o" / "latents-00000.safetensors"
    size = file.stat().st_size
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(InputError, match=rf"latents-00000\.safetensors has {size - 1} bytes, not {size}"):
        stored.read(tmp_path / "o")
    file.unlink()
    with pytest.raises(InputError, match=rf"latents-00000\.safetensors has no bytes, not {size}"):
        stored.read(tmp_path / "o")
    manifest = tmp_path / "o" / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format": 2}))
    with pytest.raises(InputError, match="is not a manifest of groups of format 1"):
        stored.read(tmp_path / "o")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"files": {"../latents.safetensors": 1}}, r"names '\.\./latents\.safetensors', which is not a file of that"),
        ({"files": {}}, r"parquet:1: its latents are in 'latents-00000\.safetensors', which manifest\.json does"),
        ({"rewards": ["one", "three"]}, r"parquet:1: the row has no 'reward/three', which flowgrpo sample writes"),
        ({"call": None}, r"manifest\.json has no 'call', which flowgrpo sample writes"),
    ],
)
def test_a_manifest_that_is_not_that_of_the_table_is_one_sentence(tmp_path, change, said):
    manifest = shelf.write(tmp_path / "o", three(), ("one", "two")) | change
    written = {name: value for name, value in manifest.items() if value is not None}
    (tmp_path / "o" / "manifest.json").write_text(json.dumps(written))
    with pytest.raises(InputError, match=said):
        stored.read(tmp_path / "o")


def test_a_column_that_is_no_plain_data_is_one_sentence(tmp_path):
    writer = stored.Writer(tmp_path / "o", {}, ("one",))
    writer.add([(shelf.group("a", [1.0, 2.0], when=object()), latents(1, 2))])
    with pytest.raises(InputError, match=r"^prompts: a column of 'a' cannot be stored"):
        writer.finish({})
