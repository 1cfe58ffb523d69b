from collections import Counter

import numpy as np
import pytest

from flowgrpo.data.generators import patterned
from rewards.patterns import Caption, Kind, parse


def test_what_is_held_out_is_never_trained_on():
    train, held_out = patterned.captions("train"), patterned.captions("eval")
    assert (len(set(train)), len(set(held_out))) == (1024, 256)
    assert not set(train) & set(held_out)
    assert not any(patterned.names_unseen(parse(caption)) for caption in train)
    assert sum(patterned.names_unseen(parse(caption)) for caption in held_out) == 64


def test_objects_keep_their_relation_and_stay_in_the_picture():
    rng = np.random.default_rng(0)
    caption = Caption((Kind("striped", "red", "circle"), Kind("banded", "blue", "square")), "above")
    for _ in range(20):
        first, second = patterned.arrange(caption, rng)
        assert second.y - first.y > abs(second.x - first.x)
        assert all(o.radius < min(o.x, o.y, 64 - o.x, 64 - o.y) + 1 for o in (first, second))


@pytest.mark.parametrize("part", [0, 1, 2])
def test_only_the_part_whose_rate_is_one_is_reworded(part):
    rng = np.random.default_rng(0)
    caption = Caption((Kind("striped", "red", "circle"), Kind("banded", "blue", "square")), "above")
    rates = tuple(float(i == part) for i in range(3))
    said = [patterned.reword(caption, rates, rng) for _ in range(1000)]
    layout = Counter((*(kind.colour for kind in each.kinds), each.relation) for each in said)
    shapes = Counter(tuple(kind.shape for kind in each.kinds) for each in said)
    words = Counter(tuple(kind.pattern for kind in each.kinds) for each in said)
    assert [len(layout), len(shapes), len(words)] == [
        60 if i == part and i == 0 else 9 if i == part else 1 for i in range(3)
    ]
    assert all(parse(str(each)) == each for each in said)
