from dataclasses import replace

import numpy as np
import pytest
import torch

from flowgrpo.data.generators import patterned
from flowgrpo.data.generators.scenes import Drawn
from rewards.patterns import PATTERNS, Caption, Kind, Parts, parse, parts, patterns, read_pattern, template

RED, BLUE = Kind("striped", "red", "circle"), Kind("checked", "blue", "square")
PLACES = (Drawn(("red", "circle"), 16, 32, 12), Drawn(("blue", "square"), 46, 32, 12))


def picture(*kinds, contrast=patterned.CONTRAST):
    objects = [replace(o, kind=(kind.colour, kind.shape)) for o, kind in zip(PLACES, kinds, strict=False)]
    return torch.from_numpy(patterned.draw(objects, kinds, contrast))[None]


def test_pictures_drawn_from_their_caption_earn_everything():
    rng = np.random.default_rng(5)
    chosen = [patterned.every_caption()[i] for i in rng.integers(0, len(patterned.every_caption()), 80)]
    images = torch.from_numpy(np.stack([patterned.draw(patterned.arrange(c, rng), c.kinds) for c in chosen]))
    assert patterns(images, [str(c) for c in chosen]) == [1.0] * 80
    assert np.mean(patterns(images, [str(c) for c in chosen[1:] + chosen[:1]])) < 0.5


@pytest.mark.parametrize(("caption", "value"), [
    ("a striped red circle and a checked blue square", (1, 1, 1)),
    ("a striped red circle left of a checked blue square", (1, 1, 1)),
    ("a checked blue square right of a striped red circle", (1, 1, 1)),
    ("a striped red circle above a checked blue square", (0.5, 1, 1)),  # the objects are there, the relation is not
    ("a striped red circle", (0.5, 0.5, 0.5)),  # one of two found was asked for
    ("a banded red circle and a checked blue square", (1, 1, 0.5)),
    ("a banded red square and a checked blue square", (1, 0.5, 0.5)),
    ("a striped green circle and a checked blue square", (0.5, 1, 1)),  # the parts are judged by themselves
    ("a banded yellow triangle", (0, 0, 0)),
])  # fmt: skip
def test_each_part_is_the_share_of_the_caption_that_is_true(caption, value):
    assert parts(picture(RED, BLUE), [caption]) == [Parts(*value)]
    layout, shape, pattern = value
    assert patterns(picture(RED, BLUE), [caption]) == pytest.approx([(2 * layout + shape + 2 * pattern) / 5])


def test_a_faint_pattern_is_read_and_none_where_there_is_none():
    box = (4, 20, 28, 44)
    for pattern in PATTERNS:
        assert read_pattern(picture(replace(RED, pattern=pattern), contrast=0.02)[0].numpy(), box) == pattern
    assert read_pattern(picture(RED, contrast=0.0)[0].numpy(), box) is None
    mixed = sum(picture(replace(RED, pattern=pattern)) for pattern in PATTERNS) / 3
    assert read_pattern(mixed[0].numpy(), box) is None


def test_patterns_are_as_often_bright_as_dark_and_never_agree():
    waves = np.stack([template(pattern, 64, 64).ravel() for pattern in PATTERNS])
    assert (waves.sum(1) == 0).all()
    assert (waves @ waves.T == 64 * 64 * np.eye(3)).all()
    assert (template("checked", 8, 8, top=3, left=5) == template("checked", 64, 64)[3:11, 5:13]).all()


def test_a_caption_is_read_as_it_is_written():
    caption = Caption((RED, BLUE), "left of")
    assert parse(f" {str(caption).upper()}.") == caption
    assert parse("a checked blue square") == Caption((BLUE,))
    for wrong in ("a red circle", "a striped red circle and a banded red square", "two striped red circles", ""):
        with pytest.raises(ValueError, match="the patterns reward cannot read the prompt"):
            parse(wrong)
