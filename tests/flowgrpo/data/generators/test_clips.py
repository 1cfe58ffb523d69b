import numpy as np

from flowgrpo.data.generators import clips
from rewards.moves import MOTIONS, parse


def test_splits_are_disjoint_and_hold_out_kinds():
    train, held_out = map(set, map(clips.captions, ("train", "eval")))
    assert (len(train), len(held_out)) == (1024, 256)
    assert not train & held_out
    assert not any(kind in clips.UNSEEN for caption in train for kind in parse(caption).kinds)
    assert sum(clips.names_unseen(parse(caption)) for caption in held_out) == 64


def test_objects_stay_in_the_picture_and_apart_and_move_as_told():
    rng = np.random.default_rng(0)
    for index in rng.integers(0, len(clips.every_caption()), 100):
        caption = clips.every_caption()[index]
        frames = clips.arrange(caption, rng)
        assert len(frames) == clips.FRAMES
        for objects in frames:
            for o in objects:
                assert o.radius <= min(o.x, o.y)
                assert max(o.x, o.y) <= clips.SIZE - o.radius
            if len(objects) == 2:
                a, b = objects
                assert max(abs(a.x - b.x), abs(a.y - b.y)) > a.radius + b.radius
        for first, last, kind in zip(frames[0], frames[-1], caption.kinds, strict=True):
            way = np.array([last.x - first.x, last.y - first.y])
            assert clips.DISTANCES[0] <= np.abs(way).sum() <= clips.DISTANCES[1] or kind.motion == "stands still"
            np.testing.assert_allclose(np.sign(way), MOTIONS[kind.motion])


def test_words_are_replaced_at_their_rates():
    rng = np.random.default_rng(0)
    caption = parse("a red circle moves left and a blue square stands still")
    assert clips.reword(caption, (0, 0, 0), rng) == caption
    seen = [clips.reword(caption, (0, 0, 1), rng) for _ in range(200)]
    assert {kind.motion for each in seen for kind in each.kinds} == set(MOTIONS)
    assert {(kind.colour, kind.shape) for each in seen for kind in each.kinds} == {
        ("red", "circle"),
        ("blue", "square"),
    }
    assert all(len({kind.colour for kind in clips.reword(caption, (1, 1, 1), rng).kinds}) == 2 for _ in range(200))
