import numpy as np
import pytest
import torch

import rewards
from flowgrpo.data.generators.scenes import arrange, captions, draw
from rewards import RewardError
from rewards import shapes as vision
from rewards.objects import rules
from rewards.objects.rules import Clause, Detection, crop, read_clauses, relations


def at(x, y, width=20, height=20, score=0.9, colour=None):
    return Detection((x - width / 2, y - height / 2, x + width / 2, y + height / 2), score, colour=colour)


# Centres apart by (dx, dy), boxes of 20 x 20: each axis loses 0.1 * (20 + 20) = 4, more than half of the length must remain.
@pytest.mark.parametrize(("dx", "dy", "expected"), [
    (-30, 0, {"left of"}), (30, 0, {"right of"}), (0, -30, {"above"}), (0, 30, {"below"}),
    (4, 0, set()),  # the margin takes it all
    (7.9, 0, set()),  # 3.9 of 7.9 is left: less than half
    (8.1, 0, {"right of"}),  # 4.1 of 8.1
    (30, -30, {"right of", "above"}),  # 26 of 42.4 on both axes
    (30, 14, {"right of"}),  # 10 of 33.1 below: less than half
    (0, 0, set()),
])  # fmt: skip
def test_a_relation_holds_beyond_the_margin_along_its_axis(dx, dy, expected):
    assert relations(at(100 + dx, 100 + dy), at(100, 100)) == expected


def test_the_margin_grows_with_the_objects():
    assert relations(at(130, 100, width=100), at(100, 100, width=60)) == set()  # the margin is 16, 14 of 30 remain


DOG, TWO_DOGS, RED_DOG = Clause("dog", 1), Clause("dog", 2), Clause("dog", 1, "red")
RIGHT = Clause("dog", 1, relation="right of", target=0)
RED, BLUE = at(50, 50, colour="red"), at(90, 50, colour="blue")


@pytest.mark.parametrize(
    ("objects", "include", "exclude", "expected"),
    [
        # asked for, forbidden: official, strict, partial
        ({"dog": [RED]}, [DOG], [], (True, True, 1)),
        ({}, [DOG], [], (False, False, 0)),
        ({"dog": [RED, BLUE]}, [DOG], [], (True, False, 0)),  # one is enough for GenEval, exactly one for the others
        ({"dog": [RED, BLUE]}, [TWO_DOGS], [Clause("dog", 3)], (True, True, 1)),
        ({"dog": [RED, BLUE, RED]}, [TWO_DOGS], [Clause("dog", 3)], (False, False, 0.5)),
        ({"dog": [RED]}, [TWO_DOGS], [Clause("dog", 3)], (False, False, 0.5)),
        ({"dog": [RED] * 4}, [DOG], [], (True, False, -2)),
        ({"dog": [RED]}, [DOG, Clause("cat", 1)], [], (False, False, 0.5)),
        ({"dog": [RED]}, [RED_DOG], [], (True, True, 1)),
        ({"dog": [BLUE]}, [RED_DOG], [], (False, False, 0.5)),
        ({"dog": [RED, BLUE]}, [RED_DOG], [], (True, False, 0)),  # GenEval looks at the surest dog
        ({"dog": [BLUE, RED]}, [RED_DOG], [], (False, False, 0)),
        ({"dog": [RED, BLUE]}, [Clause("dog", 2, "red")], [], (False, False, 0.75)),  # both found, half of them red
        ({"cat": [RED], "dog": [BLUE]}, [Clause("cat", 1), RIGHT], [], (True, True, 1)),
        ({"cat": [BLUE], "dog": [RED]}, [Clause("cat", 1), RIGHT], [], (False, False, 2 / 3)),
        ({"dog": [RED]}, [Clause("cat", 1), RIGHT], [], (False, False, 1 / 3)),  # no cat to be right of
        ({"cat": [RED, RED], "dog": [BLUE]}, [Clause("cat", 1), RIGHT], [], (True, False, 1 / 3)),
    ],
)
def test_credit(objects, include, exclude, expected):
    assert rules.official(objects, include, exclude) is expected[0]
    assert rules.strict(objects, include) is expected[1]
    assert rules.partial_credit(objects, include) == pytest.approx(expected[2])


def test_the_surest_objects_of_a_class_are_kept():
    found = {"dog": [at(0, 0, score=s) for s in (0.3, 0.31, 0.9, 0.5)], "cat": [at(0, 0, score=0.5)] * 40}
    kept = rules.surest(found, 0.3)
    assert [o.score for o in kept["dog"]] == [0.9, 0.5, 0.31]
    assert len(kept["cat"]) == 16


def test_a_crop_shows_the_object_on_grey():
    image = torch.arange(3 * 6 * 8.0).view(3, 6, 8) / 144
    mask = torch.zeros(6, 8, dtype=torch.bool)
    mask[2:4, 3:5] = True
    part = crop(image, Detection((2.6, 1.7, 5.2, 4.4), 1.0, mask))
    assert part.shape == (3, 2, 2)
    assert torch.equal(part, image[:, 2:4, 3:5])
    wider = crop(image, Detection((2, 1, 6, 5), 1.0, mask))
    assert (wider == 0.6).sum() == 3 * (4 * 4 - 2 * 2)
    assert crop(image, Detection((-3, 5.8, 0.2, 9), 1.0)).shape == (3, 1, 1)  # what lies outside has one pixel


@pytest.mark.parametrize(("row", "said"), [
    ({"class": "dog"}, "is not a row such as"), ("dog", "is not a row such as"),
    ({"class": "dog", "count": 0}, "the count of 'dog' is 0, not 1 or more"),
    ({"class": "dog", "count": 1, "color": "cyan"}, "there is no color 'cyan', choose one of red, orange"),
    ({"class": "dog", "count": 1, "position": ["beside", 0]}, "there is no position 'beside', choose one of left of"),
    ({"class": "dog", "count": 1, "position": ["above", 1]}, "refers to row 1, not to an earlier row"),
])  # fmt: skip
def test_wrong_metadata_is_explained(row, said):
    with pytest.raises(RewardError, match=f"include: .*{said}"):
        read_clauses([{"class": "cat", "count": 1}, row], "include")


def test_wrong_options_and_missing_columns_are_explained():
    for options, said in (({"credit": "most"}, "no credit 'most'"), ({"dtype": "half"}, "no dtype 'half'")):
        with pytest.raises(RewardError, match=said):
            rewards.load("geneval", options=options)
    with pytest.raises(RewardError, match="needs prompts with the column include"):
        rewards.load("geneval")(torch.zeros(1, 3, 8, 8), ["a dog"], {})


def test_the_reward_asks_the_detector_in_batches_and_names_colours_only_where_asked():
    dogs = [at(4, 4, score=0.95), at(12, 12, score=0.5)]
    found = [{"dog": dogs}, {"dog": dogs}, {"cat": [], "dog": dogs[:1]}]
    asked, named = [], []

    def detector(images, names, threshold):
        asked.append((len(images), names, threshold))
        return [found[int(image[0, 0, 0] * 100)] for image in images]

    def colours(crops, names):
        named.extend(names)
        return ["red"] * len(crops)

    reward = rewards.load("geneval", options={"detector": detector, "colours": colours, "batch_size": 2})
    images = torch.tensor([0.0, 0.01, 0.5, 0.02]).view(4, 1, 1, 1).expand(4, 3, 16, 16)
    two, red, blue = ({"class": "dog", "count": 2}, {"color": "red"}, {"color": "blue", "count": 1})
    columns = {
        "tag": ["colors", "counting", None, "colors"],
        "include": [[two | red], [two], None, [two | blue]],
        "exclude": [None, [{"class": "dog", "count": 3}], None, None],
    }
    values = reward(images, list("abcd"), columns)
    assert values[[0, 1, 3]].tolist() == [1, 0.5, 0.5]  # counting takes no object of 0.5
    assert values[2].isnan()
    assert asked == [(2, ["dog"], 0.3), (1, ["dog"], 0.3)]
    assert named == ["dog"] * 3


def shape_detector(images, names, threshold):
    """Shapes as objects of their own class, by the classical vision of the `shapes` reward."""
    return [
        {name: [Detection(f.box, 1.0) for f in found if f.shape == name] for name in names}
        for found in vision.detect(images.cpu().numpy())
    ]


def flat_colours(crops, names):
    palette = torch.tensor(list(vision.COLOURS.values()))
    middles = [crop[:, crop.shape[1] // 2, crop.shape[2] // 2] for crop in crops]
    return [list(vision.COLOURS)[int((palette - middle.cpu()).square().sum(1).argmin())] for middle in middles]


def metadata(caption):
    """A caption of the embedded world as GenEval would write it down."""
    asked = vision.parse(caption)
    include = [{"class": shape, "count": n, "color": colour} for (colour, shape), n in asked.objects.items()]
    if asked.relation:
        first, relation, second = asked.relation
        include = [{"class": kind[1], "count": 1, "color": kind[0]} for kind in (second, first)]
        include[1]["position"] = [relation, 0]
    exclude = [{"class": row["class"], "count": row["count"] + 1} for row in include]
    return {"tag": "shapes", "include": include, "exclude": exclude}


def load(credit):
    return rewards.load("geneval", options={"credit": credit, "detector": shape_detector, "colours": flat_colours})


@pytest.mark.parametrize("credit", ["official", "strict", "partial"])
def test_drawn_scenes_hold_what_their_captions_ask_for(credit):
    rng = np.random.default_rng(11)
    objects = {text: vision.parse(text).objects for text in captions("eval")}
    texts = [text for text, kinds in objects.items() if len({shape for _, shape in kinds}) == len(kinds)]
    images = torch.from_numpy(np.stack([draw(arrange(text, rng)) for text in texts]))
    reward = load(credit)

    def mean(order):
        rows = [metadata(texts[i]) for i in order]
        return reward(images, texts, {key: [row[key] for row in rows] for key in rows[0]}).mean().item()

    right = list(range(len(texts)))
    assert len(texts) > 100
    assert mean(right) > 0.98
    assert mean(right[1:] + right[:1]) < {"official": 0.05, "strict": 0.05, "partial": 0.4}[credit]


@pytest.mark.parametrize(("caption", "asked", "partial"), [
    ("a red circle left of a blue square", "a red circle right of a blue square", 4 / 5),
    ("a red circle left of a blue square", "a red circle above a blue square", 4 / 5),
    ("two red circles", "three red circles", (2 / 3) / 2),  # a wrong count, and no credit for colours
    ("two red circles", "two blue circles", 1 / 2),
    ("a red circle and a blue square", "a blue circle and a red square", 1 / 2),  # attributes bound the wrong way
])  # fmt: skip
def test_a_scene_earns_the_part_of_another_caption_that_it_holds(caption, asked, partial):
    image = torch.from_numpy(draw(arrange(caption, np.random.default_rng(3))))[None]
    columns = {key: [value] for key, value in metadata(asked).items()}
    for credit, value in (("partial", partial), ("strict", 0), ("official", 0)):
        assert load(credit)(image, [asked], columns).item() == pytest.approx(value)
