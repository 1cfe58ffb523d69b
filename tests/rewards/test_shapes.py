import itertools

import numpy as np
import pytest
import torch
from scipy import ndimage

from flowgrpo.data.generators.scenes import Drawn, arrange, captions, draw, every_caption, is_held_out, names_unseen
from rewards.shapes import BACKGROUND, COLOURS, SHAPES, Found, detect, parse, shapes


def reward(objects, caption):
    return shapes(torch.from_numpy(draw(objects))[None], [caption])[0]


RED, BLUE = Drawn(("red", "circle"), 16, 32, 8), Drawn(("blue", "square"), 46, 32, 8)


def test_pictures_drawn_from_their_caption_earn_almost_everything():
    rng = np.random.default_rng(5)
    texts = [every_caption()[i] for i in rng.integers(0, len(every_caption()), 80)]
    images = torch.from_numpy(np.stack([draw(arrange(text, rng)) for text in texts]))
    assert np.mean(shapes(images, texts)) >= 0.97
    others = texts[1:] + texts[:1]
    assert np.mean(shapes(images, others)) < 0.15


@pytest.mark.parametrize(("caption", "value"), [
    ("a red circle and a blue square", 1.0), ("a red circle left of a blue square", 1.0),
    ("a blue square right of a red circle", 1.0),
    ("a red circle right of a blue square", 0.5),  # the objects are there, the relation is not
    ("a red circle above a blue square", 0.5),
    ("a red circle", 0.5),  # one of two found was asked for
    ("two red circles and a blue square", 2 / 3),
    ("a red square and a blue square", 0.5),  # right colour, wrong shape
    ("a green circle and a blue square", 0.5),  # right shape, wrong colour
    ("three yellow triangles", 0.0),
])  # fmt: skip
def test_the_reward_is_the_share_of_the_caption_that_is_true(caption, value):
    assert reward([RED, BLUE], caption) == pytest.approx(value)


def test_above_and_below_follow_the_vertical():
    drawn = [Drawn(("red", "circle"), 30, 14, 8), Drawn(("blue", "square"), 34, 48, 8)]
    captions = (
        "a red circle above a blue square",
        "a blue square below a red circle",
        "a red circle below a blue square",
    )
    assert [reward(drawn, caption) for caption in captions] == [1, 1, 0.5]


@pytest.mark.parametrize("radius", [7.0, 9.3, 12.0])
def test_every_kind_is_recognised_at_every_size(radius):
    kinds = list(itertools.product(COLOURS, SHAPES))
    found = detect(np.stack([draw([Drawn(kind, 31.4, 29.8, radius)]) for kind in kinds]))
    assert [[(each.colour, each.shape) for each in row] for row in found] == [[kind] for kind in kinds]


def test_noise_and_blank_pictures_earn_nothing():
    noise = torch.rand(4, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    blank = torch.from_numpy(draw([]))[None]
    assert shapes(torch.cat([noise, blank]), ["a red circle"] * 5) == [0.0] * 5


def test_a_batch_without_any_colour_earns_nothing():
    blank = torch.tensor(BACKGROUND)[None, :, None, None].expand(1, 3, 64, 64)
    assert list(shapes(blank, ["a red circle"])) == [0.0]


def test_a_smear_is_not_a_shape():
    image = torch.from_numpy(draw([]))[None].clone()
    image[0, :, 20:26, 5:60] = torch.tensor(COLOURS["red"])[:, None, None]
    assert [f.shape for f in detect(image.numpy())[0]] == [None]
    assert shapes(image, ["a red square"]) == [0.0]


def found_one_by_one(image):
    """What `detect` means, one step of the definition after the other, one picture and one colour at a time."""
    palette = np.array([BACKGROUND, *COLOURS.values()], dtype=np.float32)
    nearest = ((image[None] - palette[:, :, None, None]) ** 2).sum(1).argmin(0)
    for index, colour in enumerate(COLOURS, start=1):
        labels, count = ndimage.label(ndimage.binary_opening(nearest == index, np.ones((2, 2))))
        for label in range(1, count + 1):
            rows, columns = np.nonzero(labels == label)
            if len(rows) < 24:
                continue
            top, left, bottom, right = rows.min(), columns.min(), rows.max() + 1, columns.max() + 1
            y, x = np.mgrid[top:bottom, left:right]
            v, u = (y - top + 0.5) / (bottom - top), (x - left + 0.5) / (right - left)
            templates = {
                "circle": (u - 0.5) ** 2 + (v - 0.5) ** 2 <= 0.25,
                "square": np.full(u.shape, True),
                "triangle": np.abs(u - 0.5) <= v / 2,
            }
            component = labels[top:bottom, left:right] == label
            overlap = {name: (component & t).sum() / (component | t).sum() for name, t in templates.items()}
            best = max(overlap, key=overlap.get)
            fits = overlap[best] >= 0.75 and 0.6 < (bottom - top) / (right - left) < 1.6
            centre = (np.mean(columns - left) + left, np.mean(rows - top) + top)
            yield Found(colour, best if fits else None, centre, (left, top, right, bottom))


def test_a_batch_is_read_exactly_as_its_pictures_one_by_one():
    rng = np.random.default_rng(7)
    drawn = np.stack([draw(arrange(text, rng)) for text in captions("eval")])
    grainy = drawn[:32] + rng.normal(0, 0.1, (32, 3, 64, 64)).astype(np.float32)
    blurred = ndimage.gaussian_filter(rng.standard_normal((32, 3, 64, 64)), (0, 0, 3, 3)).astype(np.float32) * 2 + 0.5
    noise = rng.random((8, 3, 64, 64), dtype=np.float32)
    images = np.concatenate([drawn, grainy.clip(0, 1), blurred.clip(0, 1), noise, np.zeros((1, 3, 64, 64), np.float32)])
    one_by_one = [list(found_one_by_one(image)) for image in images]
    assert sum(len(found) for found in one_by_one) > 1000
    assert sum(f.shape is None for found in one_by_one for f in found) > 300
    assert detect(images) == one_by_one


def test_a_picture_of_any_size_is_read_up_to_its_edges():
    image = np.broadcast_to(np.array(BACKGROUND, np.float32)[:, None, None], (3, 20, 33)).copy()
    image[:, 12:20, 25:33] = np.array(COLOURS["blue"])[:, None, None]
    image[:, 0:7, 0:7] = np.array(COLOURS["blue"])[:, None, None]
    corners = [((3.0, 3.0), (0, 0, 7, 7)), ((28.5, 15.5), (25, 12, 33, 20))]
    assert detect(image[None]) == [[Found("blue", "square", *corner) for corner in corners]]


def test_a_prompt_outside_the_language_is_explained():
    with pytest.raises(ValueError, match="cannot read the prompt 'a pink dog'"):
        shapes(torch.zeros(1, 3, 64, 64), ["a pink dog"])


def test_captions_are_read_whatever_their_case_and_spacing():
    assert parse("  A Red  circle left of a BLUE square. ") == parse("a red circle left of a blue square")


def test_the_splits_are_fixed_disjoint_and_hold_new_combinations():
    train, held_out = captions("train"), captions("eval")
    assert (len(train), len(held_out), len({*train, *held_out})) == (1024, 256, 1280)
    assert not any(is_held_out(text) or names_unseen(text) for text in train)
    assert sum(names_unseen(text) for text in held_out) == 64
    assert captions("eval") == held_out
