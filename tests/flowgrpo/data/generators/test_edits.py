"""Edits: pictures that are drawn once, instructions whose outcome the reward reads, kinds of edit held out."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from flowgrpo.data import conditions, prompts
from flowgrpo.data.generators import edits
from flowgrpo.data.generators.drafts import PromptSet
from flowgrpo.errors import InputError
from flowgrpo.schema.sections import Prompts
from rewards.shapes import shapes


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setattr(edits, "SET", PromptSet(edits.edit, train=16, eval=6))


def pictures(found, column):
    files = [np.asarray(Image.open(prompt.columns[column]), np.float32) / 255 for prompt in found]
    return torch.from_numpy(np.stack(files)).permute(0, 3, 1, 2)


def test_the_target_earns_what_the_picture_to_edit_does_not(few, tmp_path):
    section = Prompts(train="edits:train", eval="edits:eval", folder=str(tmp_path))
    found = prompts.load_split(section, "train") + prompts.load_split(section, "eval")
    texts, captions = [p.text for p in found], [p.columns["caption"] for p in found]
    assert shapes(pictures(found, "target"), texts, captions) == [1.0] * len(found)
    assert max(shapes(pictures(found, "image"), texts, captions)) < 1
    assert {p.columns["edit"] for p in found} == set(edits.EDITS)
    conditions.check([p.columns for p in found], ("image",), "prompts.train")


def test_pictures_are_drawn_once_and_always_the_same(few, tmp_path):
    first = prompts.load("edits:train", folder=str(tmp_path))
    files = {file: (file.stat().st_mtime_ns, file.read_bytes()) for file in (tmp_path / "edits").iterdir()}
    again = prompts.load("edits:train", folder=str(tmp_path))
    assert again == first
    assert [p.columns for p in again] == [p.columns for p in first]
    assert {file: (file.stat().st_mtime_ns, file.read_bytes()) for file in files} == files
    there = {Path(p.columns[name]) for p in first for name in ("image", "target")}
    assert there == set(files)


def test_what_is_done_to_which_shape_is_held_out():
    train, held_out = ({row["prompt"] for row in edits.drafts.rows("edits", edits.SET, s)} for s in ("train", "eval"))
    assert not train & held_out


@pytest.mark.parametrize(
    ("word", "new", "said", "caption"),
    [
        ("recolour", ("blue", "circle"), "make the red circle blue", "a blue circle and a green square"),
        ("reshape", ("red", "square"), "turn the red circle into a red square", "a red square and a green square"),
        (
            "replace",
            ("blue", "square"),
            "replace the red circle with a blue square",
            "a blue square and a green square",
        ),
        ("remove", None, "remove the red circle", "a green square"),
        ("add", None, "add a red circle", "a red circle and a green square"),
    ],
)
def test_an_instruction_and_its_outcome_in_words(word, new, said, caption, monkeypatch):
    drawn = iter([[word], [("red", "circle"), ("green", "square")], [new]])
    offered = []
    monkeypatch.setattr(edits, "choose", lambda rng, words, count=1: offered.append(words) or next(drawn))
    draft = edits.edit(np.random.default_rng(0))
    assert (draft.prompt, draft.columns["caption"]) == (said, caption)
    assert new is None or new in offered[2]
    assert ("green", "square") not in offered[-1] or new is None


def test_a_folder_that_cannot_be_written_is_one_sentence(few, tmp_path):
    (tmp_path / "data").write_text("a file")
    said = r"prompts.train: the pictures of edits:train cannot be drawn into .*edits \(Not a"
    with pytest.raises(InputError, match=said):
        prompts.load("edits:train", "prompts.train", folder=str(tmp_path / "data"))
    assert os.listdir(tmp_path) == ["data"]
