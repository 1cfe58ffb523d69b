import numpy as np
import pytest
import torch

from flowgrpo.shapes.scenes import Drawn, arrange, captions, draw, every_caption, is_held_out, names_unseen
from rewards.shapes import COLOURS, SHAPES, detect, parse, shapes


def reward(objects, caption):
    return shapes(torch.from_numpy(draw(objects))[None], [caption])[0]


RED, BLUE = Drawn(("red", "circle"), 16, 32, 8), Drawn(("blue", "square"), 46, 32, 8)


def test_pictures_drawn_from_their_caption_earn_almost_everything():
    rng = np.random.default_rng(5)
    texts = [every_caption()[i] for i in rng.integers(0, len(every_caption()), 400)]
    images = torch.from_numpy(np.stack([draw(arrange(text, rng)) for text in texts]))
    assert np.mean(shapes(images, texts)) >= 0.97
    others = texts[1:] + texts[:1]
    assert np.mean(shapes(images, others)) < 0.15


@pytest.mark.parametrize(
    ("caption", "value"),
    [
        ("a red circle and a blue square", 1.0),
        ("a red circle left of a blue square", 1.0),
        ("a blue square right of a red circle", 1.0),
        ("a red circle right of a blue square", 0.5),  # the objects are there, the relation is not
        ("a red circle above a blue square", 0.5),
        ("a red circle", 0.5),  # one of two found was asked for
        ("two red circles and a blue square", 2 / 3),
        ("a red square and a blue square", 0.5),  # right colour, wrong shape
        ("a green circle and a blue square", 0.5),  # right shape, wrong colour
        ("three yellow triangles", 0.0),
    ],
)
def test_the_reward_is_the_share_of_the_caption_that_is_true(caption, value):
    assert reward([RED, BLUE], caption) == pytest.approx(value)


def test_above_and_below_follow_the_vertical():
    upper, lower = Drawn(("red", "circle"), 30, 14, 8), Drawn(("blue", "square"), 34, 48, 8)
    assert reward([upper, lower], "a red circle above a blue square") == 1
    assert reward([upper, lower], "a blue square below a red circle") == 1
    assert reward([upper, lower], "a red circle below a blue square") == 0.5


@pytest.mark.parametrize("colour", COLOURS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("radius", [7.0, 9.3, 12.0])
def test_every_kind_is_recognised_at_every_size(colour, shape, radius):
    (found,) = detect(draw([Drawn((colour, shape), 31.4, 29.8, radius)]))
    assert (found.colour, found.shape) == (colour, shape)


def test_noise_and_blank_pictures_earn_nothing():
    noise = torch.rand(4, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    blank = torch.from_numpy(draw([]))[None]
    assert shapes(torch.cat([noise, blank]), ["a red circle"] * 5) == [0.0] * 5


def test_a_smear_is_not_a_shape():
    image = torch.from_numpy(draw([]))[None].clone()
    image[0, :, 20:26, 5:60] = torch.tensor(COLOURS["red"])[:, None, None]
    assert [f.shape for f in detect(image[0].numpy())] == [None]
    assert shapes(image, ["a red square"]) == [0.0]


def test_a_prompt_outside_the_language_is_explained():
    with pytest.raises(ValueError, match="cannot read the prompt 'a pink dog'"):
        shapes(torch.zeros(1, 3, 64, 64), ["a pink dog"])


def test_captions_are_read_whatever_their_case_and_spacing():
    assert parse("  A Red  circle left of a BLUE square. ") == parse("a red circle left of a blue square")


def test_the_splits_are_fixed_disjoint_and_hold_new_combinations():
    train, held_out = captions("train"), captions("eval")
    assert (len(train), len(held_out)) == (1024, 256)
    assert len(set(train)) == 1024
    assert len(set(held_out)) == 256
    assert not set(train) & set(held_out)
    assert not any(is_held_out(text) for text in train)
    assert sum(names_unseen(text) for text in held_out) == 64
    assert not any(names_unseen(text) for text in train)
    assert captions("eval") == held_out
