"""Preference pairs in Pick-a-Pic's columns: groups of two latents of the pictures, which a run trains on."""

import json
from io import BytesIO
from pathlib import Path

import pyarrow
import pytest
import torch
from conftest import furnished
from PIL import Image
from pyarrow import parquet
from runs import CALL, metrics

from flowgrpo.cli import main
from flowgrpo.data import stored
from flowgrpo.data.prompts import Row
from flowgrpo.flow.outputs import preference_pairs
from flowgrpo.flow.pipeline.loading.load import load_policy
from flowgrpo.flow.pipeline.vae_encoder import encoder

CAPTIONS = ["a red circle", "two blue square", "a green circle"]
ASKED = [f"{key}={value}" for key, value in CALL.items()]


def jpeg(colour, size=(16, 16)):
    content = BytesIO()
    Image.new("RGB", size, colour).save(content, "PNG")
    return content.getvalue()


def row(caption, label, *, colours=("red", "blue"), **other):
    first, second = (jpeg(colour, (24, 16)) for colour in colours)
    return {"caption": caption, "jpg_0": first, "jpg_1": second, "label_0": label, "label_1": 1 - label} | other


def write(path, rows):
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def command(model, source, out="o"):
    return ["sample", str(model), "--groups", out, "--pairs", str(source), *ASKED]


def test_pairs_become_groups_of_two_with_their_labels(workplace, tiny_model, capsys):
    write(workplace / "b.parquet", [row(CAPTIONS[2], 0.5)])
    write(
        workplace / "a.parquet",
        [row(CAPTIONS[0], 1.0, ranking_id=7), row(CAPTIONS[1], 0.0, colours=("white", "black"))],
    )
    (workplace / "._a.parquet").write_bytes(b"\0\5\x16\7")  # of macOS
    assert main(command(tiny_model, workplace)) == 0
    assert capsys.readouterr().out == "3 pairs in o\n"
    found = stored.read(Path("o"))
    assert found.rewards == ["label"]
    assert [group.prompt.text for group in found.groups] == CAPTIONS
    assert [group.rewards[:, 0].tolist() for group in found.groups] == [[1, 0], [0, 1], [0.5, 0.5]]
    policy = load_policy(str(tiny_model), "float32", CALL)
    white, black = torch.ones(1, 3, 16, 16), torch.zeros(1, 3, 16, 16)
    expected = encoder(policy, Row("", 0)).encode(torch.cat([white, black]))[0]
    torch.testing.assert_close(found.latents([(1, 0), (1, 1)])[0], expected)


@pytest.fixture(scope="module")
def on_pairs(tiny_model, tmp_path_factory):
    """The words of a config that trains on stored pairs."""
    with furnished(tmp_path_factory.mktemp("pairs"), tiny_model) as folder:
        labels = zip(CAPTIONS, (1.0, 0.0, 1.0), strict=True)
        write(folder / "p.parquet", [row(caption, label) for caption, label in labels])
        assert main(command(tiny_model, "p.parquet")) == 0
    data = f"data={{groups: {folder / 'o'}, rewards: {{label: 1.0}}}}"
    return ["train.group_size=2", "train.updates=1", "train.groups=3", data]


@pytest.mark.usefixtures("workplace")
def test_a_run_trains_on_pairs(on_pairs):
    dpo = ["algorithm.preset=dpo", "algorithm.objective.kl.reference=fixed"]
    assert main(["train", "tiny.yaml", *dpo, *on_pairs]) == 0
    told = metrics(Path("runs/t"))
    assert [line["groups/teaching"] for line in told] == [3, 3]
    assert [line["reward/label/mean"] for line in told] == [0.5, 0.5]
    assert [line["cost/rollout_evaluations"] for line in told] == [0, 0]
    assert told[1]["policy/mean_abs_log_ratio"] > told[0]["policy/mean_abs_log_ratio"] == 0
    assert metrics(Path("runs/t"), "eval")[-1]["reward/redness/mean"] is not None


@pytest.mark.usefixtures("workplace")
def test_snapshots_take_the_loser_s_place_in_pairs(on_pairs, capsys):
    options = ["algorithm={preset: seppo, likelihood: {bank: {every: 1, keep: 2}}}", "eval.every=9", *on_pairs]
    capsys.readouterr()
    assert main(["plan", "tiny.yaml", *options, "--format", "json"]) == 0
    planned = json.loads(capsys.readouterr().out)["model_evaluations"]
    assert main(["train", "tiny.yaml", *options]) == 0
    told = metrics(Path("runs/t"))
    assert [line["cost/update_evaluations"] for line in told] == [planned["update"]] * 2
    assert [line["cost/rollout_evaluations"] for line in told] == [planned["rollout"]] * 2 == [0, 0]
    assert told[1]["policy/mean_abs_log_ratio"] > 0
    assert all(line["policy/grad_norm"] > 0 for line in told)


def test_pairs_that_were_cut_off_are_gone_on_with(workplace, tiny_model, monkeypatch):
    monkeypatch.setattr(stored, "SHARD", 1)
    write(workplace / "p.parquet", [row(caption, 1.0) for caption in CAPTIONS])
    one = ["--batch-size", "2"]
    assert main([*command(tiny_model, "p.parquet", "whole"), *one]) == 0
    real, seen = preference_pairs.picture, []

    def cut_off(data, size, place):
        seen.append(place)
        if len(seen) == 5:
            raise KeyboardInterrupt
        return real(data, size, place)

    monkeypatch.setattr(preference_pairs, "picture", cut_off)
    assert main([*command(tiny_model, "p.parquet", "cut"), *one]) == 130
    assert main([*command(tiny_model, "p.parquet", "cut"), *one]) == 0
    assert seen[5:] == ["p.parquet:3", "p.parquet:3"]
    for path in Path("whole").iterdir():
        assert (Path("cut") / path.name).read_bytes() == path.read_bytes(), path.name


def test_a_picture_is_scaled_to_cover_and_cut_around_its_middle():
    wide = Image.new("RGB", (40, 10), "black")
    wide.paste("white", (13, 0, 27, 10))
    content = BytesIO()
    wide.save(content, "PNG")
    found = preference_pairs.picture(content.getvalue(), (20, 20), "here")
    assert found.shape == (3, 20, 20)
    assert found.min() > 0.9  # the middle 10 x 10 of it, doubled


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([{"caption": "a", "jpg_0": b"", "jpg_1": b"", "label_0": 1.0}], "--pairs: p.parquet has no column 'label_1'"),
        ([row("a", 1.0, jpg_1=b"no picture")], "p.parquet:1: not a picture"),
        ([row("a", 1.0), row(" ", 1.0)], "p.parquet:2: caption is ' ', not a text"),
        ([row("a", 1.0), row("a", 1.0, label_0=None)], "p.parquet:2: label_0 and label_1 are [None, 0.0], not numbers"),
        ([row("a", 1.0, jpg_0="a.jpg", jpg_1="b.jpg")], "p.parquet:1: jpg_0 and jpg_1 are not the bytes of pictures"),
        ([row("a", 1.0, label_1=1.0)], "p.parquet:1: label_0 and label_1 are [1.0, 1.0]; give 1 and 0, or 0.5 twice"),
    ],
)
def test_a_file_that_is_not_of_pairs_is_one_sentence(workplace, tiny_model, capsys, rows, said):
    write(workplace / "p.parquet", rows)
    assert main(command(tiny_model, "p.parquet")) == 2
    told = capsys.readouterr().err
    assert told.splitlines()[-1].startswith(f"flowgrpo: {said}")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("prompts.txt", "prompts.txt is neither a .parquet file nor a folder with some"),
        ("nowhere.parquet", "there is no file nowhere.parquet"),
        ("empty", "empty is neither a .parquet file nor a folder with some"),
    ],
)
def test_a_source_that_is_none_is_refused_before_the_model(workplace, tiny_model, unloaded, capsys, source, said):
    (workplace / "empty").mkdir()
    assert main(command(tiny_model, source)) == 2
    assert capsys.readouterr().err == f"flowgrpo: --pairs: {said}\n"
