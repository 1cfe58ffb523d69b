"""Prompts that generators draw: the same ones always, in words as the columns say, with parts that training never shows."""

import numpy as np
import pytest
import torch
import yaml

from flowgrpo.data import prompts
from flowgrpo.data.generators import compositions, drafts, moves, sounds, writing
from rewards.objects.detectors import GENEVAL_NAMES
from rewards.objects.geneval import GenEval
from rewards.objects.ocr import asked_text
from rewards.objects.rules import Detection, read_clauses
from rewards.video import motion

TASKS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")  # GenEval's
SETS = compositions.SETS | writing.SETS | moves.SETS | sounds.SETS


def rows(source):
    return prompts.BUILT_IN[source]()


def combinations(row):
    """What a row of compositions puts together, read from its columns alone."""
    include = row["include"]
    names = [one["class"] for one in include]
    pairs = {("pair", *sorted((a, b))) for a in names for b in names if a != b}
    counts = {("count", one["class"], one["count"]) for one in include if row["exclude"]}
    colours = {("colour", one["class"], one["color"]) for one in include if "color" in one}
    return pairs | counts | colours or {("alone", *names)}


@pytest.mark.parametrize("name", SETS)
def test_a_set_is_as_large_as_it_says_without_repeats_and_always_the_same(name):
    found = {}
    for split in ("train", "eval"):
        found[split] = rows(f"{name}:{split}")
        assert found[split] == rows(f"{name}:{split}")
        assert len({row["prompt"] for row in found[split]}) == len(found[split]) == getattr(SETS[name], split)
    small = drafts.PromptSet(SETS[name].draw, train=3)
    assert drafts.rows(name, small, "train") == found["train"][:3]
    assert drafts.rows(name, small, "train", seed=1) != found["train"][:3]


def test_every_row_held_out_has_a_combination_that_no_set_trains_on():
    trained = set().union(*(combinations(row) for row in rows("compositions:train")))
    held_out = [combinations(row) for row in rows("compositions:eval")]
    assert len(held_out) == 416
    assert all(asked - trained for asked in held_out)


def test_all_together_begins_with_every_task_and_holds_all_of_each():
    every = rows("compositions:eval")
    assert {row["tag"] for row in every[:20]} >= set(TASKS) - {"single_object"}
    assert {row["tag"] for row in every} == set(TASKS)
    alone = [row for name in compositions.SETS for row in rows(f"{name}:eval")]
    assert sorted(row["prompt"] for row in every) == sorted(row["prompt"] for row in alone)


def test_the_objects_are_the_classes_of_coco_in_names_that_the_detector_knows():
    assert len(set(compositions.OBJECTS)) == 80
    assert set(GENEVAL_NAMES.values()) <= set(compositions.OBJECTS)
    assert not set(GENEVAL_NAMES) & set(compositions.OBJECTS)


@pytest.mark.parametrize(
    ("name", "how", "said"),
    [
        ("umbrella", {}, "an umbrella"),
        ("bench", {"count": 3}, "three benches"),
        ("bench", {"colour": "orange"}, "an orange bench"),
        ("skis", {}, "a pair of skis"),
        ("scissors", {"count": 2}, "two pairs of scissors"),
        ("scissors", {"colour": "red"}, "a pair of red scissors"),
        ("computer mouse", {"count": 4}, "four computer mice"),
        ("wine glass", {"count": 2}, "two wine glasses"),
        ("broccoli", {"article": "the"}, "the head of broccoli"),
    ],
)
def test_objects_in_words(name, how, said):
    assert compositions.phrase(name, **how) == said


DRAWN = """
- [colors, [[cat], [orange]], an orange cat, [{class: cat, count: 1, color: orange}]]
- [position, [[dog, car], [left of]], a dog left of a car,
   [{class: car, count: 1}, {class: dog, count: 1, position: [left of, 0]}]]
- [color_attr, [[dog, car], [red, blue]], a red dog and a blue car,
   [{class: dog, count: 1, color: red}, {class: car, count: 1, color: blue}]]
- [two_counts, [[dog, car], [3, 2]], three dogs and two cars, [{class: dog, count: 3}, {class: car, count: 2}]]
- [two_relations, [[dog, cup, car], [above, right of]], a dog above a car and a cup right of the car,
   [{class: car, count: 1}, {class: dog, count: 1, position: [above, 0]},
    {class: cup, count: 1, position: [right of, 0]}]]
"""


@pytest.mark.parametrize(("task", "drawn", "said", "include"), yaml.safe_load(DRAWN))
def test_the_columns_say_what_the_prompt_says(task, drawn, said, include, monkeypatch):
    words = iter(drawn)
    monkeypatch.setattr(compositions, "choose", lambda *_: next(words))
    draft = compositions.SETS[task].draw(np.random.default_rng(0))
    assert (draft.prompt, draft.columns["include"]) == (f"a photo of {said}", include)


def test_the_reward_takes_every_row_and_gives_all_for_what_was_asked():
    def detector(images, names, threshold):
        """Finds a row of objects side by side, as many of each class as are asked for."""
        return [
            {c["class"]: [Detection((k, 0, k + 1, 1), 0.95) for k in range(c["count"])] for c in row["include"]}
            for row in asked
        ]

    found = rows("compositions:eval")
    for row in found:
        read_clauses(row["include"], row["prompt"])
        read_clauses(row["exclude"] or (), row["prompt"])
    asked = [row for row in found if row["tag"] in ("single_object", "two_object", "counting")][:40]
    reward = GenEval("official", detector=detector, colours=lambda crops, names: [], batch_size=64, device="cpu")
    columns = {name: [row[name] for row in asked] for name in ("tag", "include", "exclude")}
    assert reward(torch.zeros(len(asked), 3, 8, 8), [row["prompt"] for row in asked], **columns) == [1.0] * len(asked)


def test_a_text_is_quoted_as_the_reward_reads_it_and_its_words_are_held_out():
    train, held_out = rows("ocr:train"), rows("ocr:eval")
    for row in (*train, *held_out):
        assert row["tag"] == "ocr"
        assert asked_text(row["prompt"]) == row["text"] == asked_text(row["prompt"], row["text"])
    frames = {"the", "&"} | {word.lower() for word in writing.NUMBERED}
    trained = {word for row in train for word in row["text"].lower().split()} - frames
    assert all(set(row["text"].lower().split()) - frames - trained for row in held_out)


@pytest.mark.parametrize(
    ("source", "tag", "begin", "pairs"),
    [
        (
            "motion",
            "motion",
            ("subject", "action", "direction"),
            (("subject", "action"), ("subject", "camera"), ("action", "direction")),
        ),
        ("sounds", "sound", ("source", "sound"), (("source", "sound"), ("sound", "background"))),
    ],
)
def test_a_prompt_says_what_the_columns_say_and_their_combinations_are_held_out(source, tag, begin, pairs):
    def combined(row):
        return {(row[one], row[other]) for one, other in pairs if row[other]}

    train, held_out = rows(f"{source}:train"), rows(f"{source}:eval")
    for row in (*train, *held_out):
        said = " ".join(row[name] for name in begin if row[name])
        assert row["prompt"].lower().startswith(said.lower() + " ")
        assert row["prompt"].partition(", the camera ")[2] == row.get("camera", "")
        assert row["prompt"].partition(", while ")[2] == (row.get("background") or "")
        assert row["tag"] == tag
    trained = set().union(*map(combined, train))
    assert all(combined(row) - trained for row in held_out)
    assert {row[pairs[-1][1]] is None for row in train} == {True, False}


def test_the_reward_of_motions_takes_their_prompts():
    assert motion(torch.zeros(2, 3, 3, 8, 8), [row["prompt"] for row in rows("motion:train")[:2]]) == [0.0, 0.0]
