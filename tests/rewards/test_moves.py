import numpy as np
import pytest
import torch

from flowgrpo.data.generators import clips
from flowgrpo.data.generators.scenes import Drawn
from rewards.moves import Caption, Kind, moves, parse, read_motion


def clip(*ways):
    """A clip of objects (kind, start, end)."""
    frames = []
    for time in range(clips.FRAMES):
        part = time / (clips.FRAMES - 1)
        places = [np.array(start) + part * (np.array(end) - np.array(start)) for _, start, end in ways]
        frames.append([Drawn(kind, *place, 7) for (kind, *_), place in zip(ways, places, strict=True)])
    return torch.from_numpy(clips.draw(frames))[None]


RED = (("red", "circle"), (36, 12), (18, 12))  # to the left
BLUE = (("blue", "square"), (24, 36), (24, 36))  # still


def test_clips_drawn_from_their_caption_earn_everything():
    rng = np.random.default_rng(5)
    chosen = [clips.every_caption()[i] for i in rng.integers(0, len(clips.every_caption()), 60)]
    videos = torch.from_numpy(np.stack([clips.draw(clips.arrange(c, rng)) for c in chosen]))
    assert min(moves(videos, [str(c) for c in chosen])) > 0.95  # one may lose its shape in a frame
    assert np.mean(moves(videos, [str(c) for c in chosen[1:] + chosen[:1]])) < 0.5


@pytest.mark.parametrize(("caption", "value"), [
    ("a red circle moves left and a blue square stands still", 1),
    ("a blue square stands still and a red circle moves left", 1),
    ("a red circle moves right and a blue square stands still", 3 / 4),
    ("a red triangle moves left and a blue square stands still", 7 / 8),
    ("a red triangle moves up and a blue square moves down", 3 / 8),
    ("a green circle moves left and a blue square stands still", 1 / 2),  # nothing is earned without the colour
    ("a red circle moves left", 1 / 2),  # one of two found was asked for
    ("a yellow circle moves left", 0),
])  # fmt: skip
def test_colours_shapes_and_motions_earn_their_parts(caption, value):
    assert moves(clip(RED, BLUE), [caption]) == pytest.approx([value])


def test_an_object_that_is_asked_for_and_missing_earns_nothing():
    assert moves(clip(RED), ["a red circle moves left and a blue square stands still"]) == [1 / 2]


def test_an_object_that_is_seen_in_some_frames_earns_for_those():
    video = clip(RED)
    video[0, 3:] = video.new_tensor(clips.draw([[]]))[0]
    assert moves(video, ["a red circle moves left"]) == pytest.approx([(1 / 3 + 1 / 3) / 4])


@pytest.mark.parametrize(("way", "motion"), [
    ((0, 0), "stands still"), ((3, -3), "stands still"), ((-9, 0), "moves left"), ((9, 3), "moves right"),
    ((2, -9), "moves up"), ((0, 9), "moves down"), ((9, 9), None), ((-9, 6), None),
])  # fmt: skip
def test_a_motion_is_the_direction_of_most_of_the_way(way, motion):
    centres = {time: (20 + way[0] * time / 8, 20 + way[1] * time / 8) for time in range(9)}
    assert read_motion(centres, 9) == motion
    assert read_motion({time: centres[time] for time in (0, 2, 4, 6, 8)}, 9) == motion
    assert read_motion({time: centres[time] for time in range(4)}, 9) is None


def test_captions_are_read_as_they_are_written():
    for caption in clips.every_caption():
        assert parse(str(caption)) == caption
    assert parse("A red circle  moves left.") == Caption((Kind("red", "circle", "moves left"),))


@pytest.mark.parametrize("text", ["a circle", "a red circle moves left and a red square stands still", "a red circle"])
def test_other_captions_are_refused_with_an_example(text):
    with pytest.raises(ValueError, match="write for example 'a red circle moves left'"):
        parse(text)


def test_pictures_are_refused():
    with pytest.raises(ValueError, match="moves takes videos"):
        moves(torch.zeros(1, 3, 48, 48), ["a red circle moves left"])
