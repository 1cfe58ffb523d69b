"""Files of the trees that a run keeps."""

import base64
import io
import json
import math
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from flowgrpo.errors import InputError
from flowgrpo.schema.saving import Trees
from flowgrpo.training.reports.tree_store import KeptNode, KeptTree, TreeFolder, encode_picture, merge_trees


def node(parent, step, **fields):
    return KeptNode(parent=parent, step=step, sigma=1 - step / 2, **fields)


TREE = KeptTree(
    step=3,
    group=1,
    prompt="a <b>",
    sigmas=(1.0, 0.5, 0.0),
    names=("one", "two"),
    size=(3, 2),
    nodes=(
        node(None, 0, seed=5, picture="UklG", estimated=True),
        node(0, 1, kernel="sde 0.7", noise=0.3, trained=True, updated=True, unit=0, compared=(1, 2), advantage=-0.5),
        node(1, 2, picture="UklG", rewards=(0.25, None), total=0.25),
    ),
)


def test_what_is_written_is_read_again(tmp_path):
    TreeFolder(tmp_path).write([TREE])
    assert TreeFolder(tmp_path).read() == [TREE]
    file = tmp_path / "trees/step-000003/0001.json"
    assert TreeFolder(tmp_path).sizes() == {3: file.stat().st_size}
    (file.parent / "._0001.json").write_bytes(b"\0\5\x16\7")  # of macOS
    assert TreeFolder(tmp_path).read() == [TREE]
    assert TreeFolder(tmp_path).sizes() == {3: file.stat().st_size}


def test_a_picture_is_kept_as_it_looks():
    picture = np.zeros((4, 6, 4), dtype=np.uint8)
    picture[:, 3:] = [200, 40, 90, 255]
    with Image.open(io.BytesIO(base64.b64decode(encode_picture(picture[None])))) as image:
        shown = np.asarray(image.convert("RGBA")).astype(int)
    assert np.abs(shown[:, 5] - [200, 40, 90, 255]).max() < 30
    assert (shown[:, 0, 3] < 30).all()


def test_several_frames_are_a_film_of_two_seconds_that_loops():
    frames = np.full((5, 6, 6, 4), 255, dtype=np.uint8)
    frames[:, 0, 0, 0] = range(0, 250, 50)  # equal ones would be merged
    with Image.open(io.BytesIO(base64.b64decode(encode_picture(frames)))) as image:
        assert image.n_frames == 5
        assert image.info["loop"] == 0
        image.load()
        assert image.info["duration"] == 400


def test_parts_of_a_group_are_joined_with_their_numbers_moved_on():
    other = replace(TREE, nodes=(node(None, 0, seed=6), replace(TREE.nodes[1], unit=1)))
    (whole,) = merge_trees([TREE, other])
    assert [each.parent for each in whole.nodes] == [None, 0, 1, None, 3]
    assert [each.unit for each in whole.nodes] == [None, 0, None, None, 2]
    assert [each.group for each in merge_trees([TREE, replace(TREE, group=0)])] == [0, 1]


def test_trees_after_a_step_are_forgotten(tmp_path):
    folder = TreeFolder(tmp_path)
    folder.forget_after(0)  # a run that kept none yet
    for step in (1, 3, 4):
        folder.write([replace(TREE, step=step)])
    (tmp_path / "trees/step-of-mine").mkdir()
    folder.forget_after(3)
    assert list(folder.sizes()) == [1, 3]
    assert not (tmp_path / "trees/step-000004").exists()


@pytest.mark.parametrize(
    "change",
    [
        lambda tree: [],
        lambda tree: {**tree, "nodes": [{"step": 1}]},
        lambda tree: {**tree, "nodes": [*tree["nodes"], {**tree["nodes"][1], "step": 0}]},
        *(
            lambda tree, other=other: {**tree, **other}
            for other in ({"nodes": []}, {"sigmas": None}, {"names": [{}]}, {"names": ["one"]}, {"size": [0, 3]})
        ),
        *(
            lambda tree, other=other: {**tree, "nodes": [{**tree["nodes"][0], **other}]}
            for other in ({"parent": 7}, {"total": math.nan}, {"picture": "<svg>"}, {"total": "a"}, {"step": 9})
        ),
    ],
)
def test_a_damaged_file_is_one_sentence(tmp_path, change):
    TreeFolder(tmp_path).write([TREE])
    file = tmp_path / "trees/step-000003/0001.json"
    file.write_text(json.dumps(change(json.loads(file.read_text()))))
    with pytest.raises(InputError, match=r"0001\.json: it is not a tree that a run kept \("):
        TreeFolder(tmp_path).read()


def test_trees_are_due_at_every_so_many_iterations_and_at_the_last():
    assert [i for i in range(11) if Trees(every=4).due(i, 11)] == [0, 4, 8, 10]
    assert [i for i in range(3) if Trees(every=8).due(i, 3)] == [0, 2]
