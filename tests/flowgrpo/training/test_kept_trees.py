"""Files of the trees that a run keeps."""

import json
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from flowgrpo.errors import InputError
from flowgrpo.schema.kept import Trees
from flowgrpo.training.kept_trees import COLUMNS, KeptNode, KeptTree, Part, TreeFolder, joined


def node(parent, step, **fields):
    return KeptNode(parent=parent, step=step, sigma=1 - step / 2, role="trunk", **fields)


TREE = KeptTree(
    step=3,
    group=1,
    prompt="a <b>",
    sigmas=(1.0, 0.5, 0.0),
    names=("one", "two"),
    tile=(0, 0),
    nodes=(
        node(None, 0, seed=5, tile=0, estimated=True),
        node(
            0, 1, kernel="flow_sde 0.7", noise=0.3, trained=True, updated=True, unit=0, compared=(1, 2), advantage=-0.5
        ),
        node(1, 2, tile=1, rewards=(0.25, None), total=0.25),
    ),
)


def painted(*reds):
    return [np.full((2, 3, 4), red, dtype=np.uint8) for red in reds]


def test_what_is_written_is_read_again_with_its_pictures(tmp_path):
    TreeFolder(tmp_path).write([Part(TREE, painted(10, 250))])
    ((tree, sheet),) = TreeFolder(tmp_path).read()
    assert tree == replace(TREE, tile=(3, 2))
    assert sheet == tmp_path / "trees/step-000003/0001.webp"
    with Image.open(sheet) as image:
        assert image.size == (6, 2)
        assert np.abs(np.asarray(image.convert("RGBA"))[0, [0, 5]].astype(int) - [[10] * 4, [250] * 4]).max() < 12
    assert list(TreeFolder(tmp_path).sizes()) == [3]


def test_a_sheet_has_rows_of_tiles(tmp_path):
    TreeFolder(tmp_path).write([Part(TREE, painted(*range(COLUMNS + 1)))])
    with Image.open(tmp_path / "trees/step-000003/0001.webp") as image:
        assert image.size == (3 * COLUMNS, 4)


def test_trees_without_pictures_have_no_sheet(tmp_path):
    unseen = replace(TREE, nodes=tuple(replace(each, tile=None) for each in TREE.nodes))
    TreeFolder(tmp_path).write([Part(unseen, [])])
    assert TreeFolder(tmp_path).read() == [(unseen, None)]


def test_parts_of_a_group_are_joined_with_their_numbers_moved_on():
    other = replace(TREE, nodes=(node(None, 0, seed=6), replace(TREE.nodes[1], tile=0, unit=1)))
    (part,) = joined([Part(TREE, painted(1, 2)), Part(other, painted(3))])
    assert [each.parent for each in part.tree.nodes] == [None, 0, 1, None, 3]
    assert [each.tile for each in part.tree.nodes] == [0, None, 1, None, 2]
    assert [each.unit for each in part.tree.nodes] == [None, 0, None, None, 2]
    assert [int(picture[0, 0, 0]) for picture in part.pictures] == [1, 2, 3]
    assert [each.tree.group for each in joined([Part(TREE, []), Part(replace(TREE, group=0), [])])] == [0, 1]


def test_trees_after_a_step_are_forgotten(tmp_path):
    folder = TreeFolder(tmp_path)
    folder.forget_after(0)  # a run that kept none yet
    for step in (1, 3, 4):
        folder.write([Part(replace(TREE, step=step), painted(1, 2))])
    (tmp_path / "trees/step-of-mine").mkdir()
    folder.forget_after(3)
    assert list(folder.sizes()) == [1, 3]
    assert not (tmp_path / "trees/step-000004").exists()


@pytest.mark.parametrize(
    "change",
    [
        lambda tree: [],
        lambda tree: {**tree, "nodes": [{**tree["nodes"][0], "parent": 7}]},
        lambda tree: {**tree, "nodes": [{"step": 1}]},
        lambda tree: {**tree, "nodes": []},
        lambda tree: {**tree, "sigmas": None},
        lambda tree: {**tree, "names": [{}]},
        lambda tree: {**tree, "nodes": [{**tree["nodes"][0], "total": "a"}]},
        lambda tree: {**tree, "nodes": [{**tree["nodes"][0], "step": 9}]},
    ],
)
def test_a_damaged_file_is_one_sentence(tmp_path, change):
    TreeFolder(tmp_path).write([Part(TREE, painted(1, 2))])
    file = tmp_path / "trees/step-000003/0001.json"
    file.write_text(json.dumps(change(json.loads(file.read_text()))))
    with pytest.raises(InputError, match=r"0001\.json: it is not a tree that a run kept \("):
        TreeFolder(tmp_path).read()


def test_trees_are_due_at_every_so_many_iterations_and_at_the_last():
    assert [i for i in range(11) if Trees(every=4).due(i, 11)] == [0, 4, 8, 10]
    assert [i for i in range(3) if Trees(every=8).due(i, 3)] == [0, 2]
