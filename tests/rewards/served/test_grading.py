"""How answers of vision-language models are read."""

import math

import pytest

from rewards.served.grading import expected_value, read_answer

FIVE = {str(n): float(n) for n in range(1, 6)}
WORDS = {"excellent": 5.0, "good": 4.0, "fair": 3.0, "poor": 2.0, "bad": 1.0}


@pytest.mark.parametrize(("words", "answers", "value"), [
    ("4", FIVE, 4), (" 4.\n", FIVE, 4), ("3.7", FIVE, 3.7), ("6", FIVE, None), ("0.5", FIVE, None),
    ("4/5", FIVE, None), ("4 or 5", FIVE, None), ("I would say 4", FIVE, None), ("", FIVE, None), ("nan", FIVE, None),
    ('{"answer": 3}', FIVE, 3), ('{"answer": "3"}', FIVE, 3), ('{"answer": 3, "why": "x"}', FIVE, None),
    ('{"answer": true}', FIVE, None), ("[" * 100_000, FIVE, None), ("dog (animal): 1\nFinal Score: 3.5", FIVE, 3.5),
    ("Final Score: 3\nBut then again, no.", FIVE, None), ("Score: 2\nScore: 5", FIVE, 5),
    ("<think>4?</think><answer>Good</answer>", WORDS, 4), ("Excellent.", WORDS, 5), ("4", WORDS, None),
    ("not bad", WORDS, None),
])  # fmt: skip
def test_words_are_read_strictly(words, answers, value):
    assert read_answer(words, answers) == value


def test_words_are_weighted_by_the_tokens_that_begin_them():
    sure = [("Ex", math.log(0.5)), (" good", math.log(0.25)), ("G", math.log(0.25))]
    assert expected_value(sure, WORDS) == pytest.approx(4.5)
    assert expected_value([("The", math.log(0.6)), ("good", math.log(0.4))], WORDS) is None  # mostly no answer
    assert expected_value([("", 0.0), (" ", 0.0)], WORDS) is None
