import math
import sys

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageFont

import rewards
from rewards import RewardError
from rewards.objects.ocr import Ocr, asked_text, reading_order, similarity

PAPER, INK = (250, 246, 236), (30, 40, 110)


def picture(*lines, size=36, angle=0.0, height=192, width=320):
    """Lines of text drawn one below the other, float (3, height, width)."""
    image = Image.new("RGB", (width, height), PAPER)
    font = ImageFont.load_default(size)
    for i, line in enumerate(lines):
        y = height / 2 + (i - (len(lines) - 1) / 2) * size * 1.6
        ImageDraw.Draw(image).text((width / 2, y), line, fill=INK, font=font, anchor="mm")
    turned = image.rotate(angle, resample=Image.BICUBIC, fillcolor=PAPER)
    return torch.from_numpy(np.array(turned)).permute(2, 0, 1) / 255


@pytest.fixture(scope="module")
def reward():
    return rewards.load("ocr", options={"threads": 2})


WORDS = ["Open until nine", "Fresh Bread", "NO EXIT", "Route 66"]


@pytest.mark.parametrize("how", [{}, {"angle": -5}, {"size": 12}], ids=str)
def test_rendered_words_are_read(reward, how):
    images = torch.stack([picture(text, **how) for text in WORDS])
    read = list(reward.function.read(images))
    right, wrong = (list(map(similarity, read, texts)) for texts in (WORDS, WORDS[1:] + WORDS[:1]))
    assert min(right) > 0.9
    assert max(wrong) < 0.4


def test_several_lines_are_read_in_order_the_column_goes_before_the_prompt_and_mirrored_text_earns_little(reward):
    assert reward(picture("Fresh Bread").flip(2)[None], ['"Fresh Bread"'], {}).item() < 0.4
    image = picture("Coffee", "and cake", angle=5)[None]
    column = {"text": ["Coffee and cake"]}
    assert reward(image, ['a sign "Tea"'], column).item() == 1
    assert reward(image, ['a sign "Tea"'], {"text": [None]}).item() < 0.4


def test_a_value_depends_neither_on_the_batch_nor_on_the_threads(reward):
    images = torch.stack([picture("Open until nine"), picture("Open untll"), torch.rand(3, 192, 320), picture("Lake")])
    prompts = ['"Open until nine"', '"Open until nine"', '"noise"', "a lake"]
    values = reward(images, prompts, {})
    one_thread = rewards.load("ocr", options={"threads": 1, "batch_size": 1})
    alone = [one_thread(images[i : i + 1], prompts[i : i + 1], {}).item() for i in range(4)]
    assert values[:3].tolist() == alone[:3]
    assert values[0] == 1 > values[1] > 0.6 > values[2] == 0
    assert values[3].isnan()  # nothing is asked for
    assert math.isnan(alone[3])


def test_other_text_costs_where_a_substring_is_not_enough(reward):
    image = picture("Fresh Bread daily")[None]
    assert reward(image, ['"fresh bread"'], {}).item() == 1
    exact = rewards.load("ocr", options={"substring": False})
    assert exact(image, ['"fresh bread"'], {}).item() == pytest.approx(1 - 5 / 10)  # "daily" is too much


def test_a_video_is_read_in_evenly_spaced_frames():
    shown, blank = picture("NO EXIT", height=96, width=192), picture("", height=96, width=192)
    videos = torch.stack([torch.stack([shown] * 5), torch.stack([shown, blank, blank, blank, blank])])
    prompts = ['"no exit"'] * 2
    mean = rewards.load("video_ocr", options={"frames": 3})
    assert mean(videos, prompts, {}).tolist() == pytest.approx([1, 1 / 3])
    assert rewards.load("video_ocr", options={"frames": 3, "best": True})(videos, prompts, {}).tolist() == [1, 1]
    assert mean(videos[1:, 1:2], prompts[:1], {}).tolist() == [0]  # fewer frames than are asked for
    assert mean(videos[:1], ["no quotes"], {}).isnan()


@pytest.mark.parametrize(("prompt", "text", "expected"), [
    ('a sign that says "Open 24/7"', None, "Open 24/7"),
    ('"One" above “Two” and «Three», „Vier“, 「五」', None, "One Two Three Vier 五"), ("it's a dog's life", None, None),
    ('an empty "  " quote', None, None), ("a sign", "Hello", "Hello"), ('a sign "Tea"', "Coffee", "Coffee"),
    ('a sign "Tea"', "", None), ("a year", 2024, "2024"),
])  # fmt: skip
def test_what_is_asked_for(prompt, text, expected):
    assert asked_text(prompt, text) == expected


@pytest.mark.parametrize(("read", "asked", "with_substring", "without"), [
    ("HELLO\nworld", "Hello World", 1, 1),
    ("Ｈｅｌｌｏ！", "hello!", 1, 1),  # full-width letters, as some recognisers print them
    ("Don’t stop – now", "Don't stop - now", 1, 1), ("hello", "hello!", 5 / 6, 5 / 6),
    ("the hello there", "hello", 1, 0), ("jello", "hello", 4 / 5, 4 / 5), ("", "hello", 0, 0),
    ("completely different and long", "cat", 0, 0),
])  # fmt: skip
def test_what_is_read_is_compared_by_its_letters(read, asked, with_substring, without):
    assert similarity(read, asked) == pytest.approx(with_substring)
    assert similarity(read, asked, substring=False) == pytest.approx(without)


@pytest.mark.parametrize("degrees", [0, 5, -5, 12])
def test_boxes_are_ordered_by_lines_whatever_their_tilt(degrees):
    places = [(0, 0, 60), (90, 2, 200), (320, -2, 40), (0, 40, 150), (180, 42, 90)]  # left, top and width, 20 high
    boxes = np.array([[(x, y), (x + w, y), (x + w, y + 20), (x, y + 20)] for x, y, w in places], float)
    turn = math.radians(degrees)
    boxes = boxes @ np.array([[math.cos(turn), math.sin(turn)], [-math.sin(turn), math.cos(turn)]]) + 300
    mixed = np.random.default_rng(0).permutation(len(places))
    assert mixed[reading_order(boxes[mixed])].tolist() == [0, 1, 2, 3, 4]


def test_what_is_wrong_is_explained(monkeypatch):
    with pytest.raises(RewardError, match="threads of 1 or more, not 0"):
        rewards.load("ocr", options={"threads": 0})
    with pytest.raises(ValueError, match="ocr takes images"):
        rewards.load("ocr")(torch.zeros(1, 2, 3, 8, 8), ["a"], {})
    with pytest.raises(ValueError, match="video_ocr takes videos"):
        rewards.load("video_ocr")(torch.zeros(1, 3, 8, 8), ["a"], {})
    monkeypatch.setitem(sys.modules, "rapidocr", None)
    monkeypatch.setattr("rewards.objects.ocr.find_spec", lambda name: None)
    with pytest.raises(RewardError, match=r"the OCR rewards need the package rapidocr: pip install 'flowgrpo\[ocr\]'"):
        Ocr()(torch.zeros(1, 3, 8, 8), ["no text"])
