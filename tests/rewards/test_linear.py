"""What reads a model's text does so in one pass: 40 KB of any signs take less than a second, not several."""

import random
import re
import time

import pytest

from rewards.objects.ocr import asked_text, edit_distance, similarity
from rewards.served.grading import read_answer
from rewards.texts.code import code_format, program_of
from rewards.texts.text import answer_of, arithmetic, countdown, final_answer, gsm8k, gsm8k_accuracy, math_answer, tags

HOSTILE = (
    "<answer>", "<answer>a", "<Answer>", "<reasoning></reasoning><answer>", "<reasoning>\n\n</reasoning>\n<answer>\n",
    "</reasoning> ", "\n", " ", "\t", "\n!", "„", "“", "„a“„", "«", "「", '"', "\\boxed", "\\boxed{", "\\boxed \n",
    "\\text{", "\\frac{", "\\frac{1", "\\frac1", "\\sqrt", "9", "1,000", ",000", "1.", ".", "1/", "####", "#### \n",
    "```python\n", "```", "``` ", "score", "score:", "\nscore!", "\nfinal score\n", "{", "}", "$", "-", "^{\\circ", "\\",
    "~", "²", "٣",
)  # fmt: skip


@pytest.mark.parametrize("piece", HOSTILE, ids=repr)
def test_every_reader_takes_40_kilobytes_in_a_second(piece):
    whole = piece * (40_000 // len(piece))
    frames = ("{}", "<reasoning>{}", "<answer>{}</answer>", "<reasoning>\n{}\n</answer>", "\\boxed{{{}")
    for text in (frame.format(whole) for frame in frames):
        for reader in (
            answer_of, program_of, asked_text,
            lambda text: [f([text], [""], ["42"]) for f in (gsm8k, math_answer)],  # which compare as their accuracies do
            lambda text: arithmetic([text], [""], ["42"], [True]), lambda text: tags([text], [""]),
            lambda text: code_format([text], [""]), lambda text: read_answer(text, {"1": 1.0, "5": 5.0}),
        ):  # fmt: skip
            start = time.process_time()
            reader(text)
            assert time.process_time() - start < 1


@pytest.mark.parametrize("piece", ["ab", "a", "\u0301\u0323"])  # the last are put in order, which is quadratic
@pytest.mark.parametrize("asked", ["bx", "b" * 100_000, "ba" * 50_000])
def test_what_is_read_is_compared_with_what_is_asked_in_a_second(piece, asked):
    start = time.process_time()
    assert 0 <= similarity(piece * 50_000, asked) < 1
    assert time.process_time() - start < 1


def test_the_edit_distance_of_any_texts_is_that_of_the_table():
    def table(a, b):
        row = list(range(len(b) + 1))
        for i, letter in enumerate(a, start=1):
            diagonal, row[0] = row[0], i
            for j, other in enumerate(b, start=1):
                diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (letter != other))
        return row[-1]

    dice = random.Random(0)
    for _ in range(300):
        a, b = ("".join(dice.choices("abc日", k=dice.randrange(100))) for _ in range(2))
        assert edit_distance(a, b) == table(a, b)


# The plain patterns that say what is meant, and take a time quadratic in the text.
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
QUOTED = re.compile(r'"([^"]+)"|„([^“”]+)[“”]|“([^”]+)”|«([^»]+)»|「([^」]+)」')
LOOSE = re.compile(r"\s*<reasoning>.*?</reasoning>\s*<answer>.*?</answer>", re.DOTALL)
STRICT = re.compile(r"<reasoning>\n.*?\n</reasoning>\n<answer>\n.*?\n</answer>\n?", re.DOTALL)


def drawn(pieces, count):
    dice = random.Random(0)
    return ["".join(dice.choices(pieces, k=dice.randrange(9))) for _ in range(count)]


def test_the_readers_find_what_the_plain_patterns_find():
    whole = "<reasoning>\nx\n</reasoning>\n<answer>\n4\n</answer>\n"
    marks = ["<reasoning>", "</reasoning>", "<answer>", "</answer>"]
    pieces = [*marks, "\n", "\n", " ", "4", "</answer>\n", "<reasoning>\n"]
    texts = drawn(pieces, 4000) + [whole[:i] + cut + whole[i:] for i in range(len(whole)) for cut in pieces]
    seen = set()
    for text in texts:
        found = ANSWER.findall(text)
        assert answer_of(text) == (found[-1].strip() if found else None)
        right = 2.0 * gsm8k_accuracy([text], [""], ["4"])[0]
        digits = 0.5 * bool(re.fullmatch("[+-]?[0-9]+", final_answer(text) or ""))
        form = 0.5 * bool(LOOSE.match(text)) + 0.5 * bool(STRICT.fullmatch(text))
        assert gsm8k([text], [""], ["4"]) == pytest.approx([tags([text], [""])[0] + form + digits + right])
        seen.add(form)
    assert seen == {0.0, 0.5, 1.0}


def test_quotes_are_those_of_the_plain_pattern():
    found = 0
    for prompt in drawn(list('""„“”«»「」ab '), 4000):
        parts = " ".join(part for groups in QUOTED.findall(prompt) for part in groups if part)
        assert asked_text(prompt) == (parts if parts.strip() else None)
        found += bool(parts.strip())
    assert found > 500


def test_integers_of_any_length_are_compared():
    long = "9" * 4400
    answers = [long, "-" + long, long, "+0" + long, "0" * 5000, "12"]
    rights = [long, long, "-" + long, long, 0, "12 "]
    assert arithmetic(answers, [""] * 6, rights, [True] * 6) == [1.0, 0.0, 0.0, 1.0, 1.0, 1.0]
    with pytest.raises(ValueError, match="arithmetic takes an integer as the answer, not 'twelve'"):
        arithmetic(["12"], [""], ["twelve"], [True])


@pytest.mark.parametrize(
    ("numbers", "target"),
    [("9" * 4400, 1), (["9" * 4400], 1), ([1], "9" * 4400), ([1], "one"), (1, 1), ([1], float("inf"))],
)
def test_columns_of_a_countdown_that_are_no_integers_are_one_sentence(numbers, target):
    with pytest.raises(ValueError, match="countdown takes integers as numbers and target, not"):
        countdown(["1"], [""], numbers=[numbers], target=[target], bare=[True])
