import json
from pathlib import Path

import pytest

import rewards
from rewards.texts import latex
from rewards.texts.expression import NotArithmetic, value
from rewards.texts.text import (
    answer_of,
    arithmetic,
    countdown,
    final_answer,
    gsm8k,
    gsm8k_accuracy,
    math_accuracy,
    math_answer,
    solved,
    sudoku,
    tags,
)

DATA = Path(__file__).parents[2] / "data"
ROWS = json.loads((DATA / "text_rewards.json").read_text())
# Which of the released functions calls which text right, as they answered when they were run, and the one that ours follows.
RELEASED = json.loads((DATA / "gsm8k_answers.json").read_text())


@pytest.mark.parametrize(("reward", "names"), [(countdown, ("numbers", "target")), (sudoku, ("puzzle", "solution"))])
def test_a_reward_gives_the_scores_of_the_reference(reward, names):
    rows = ROWS[reward.__name__]
    columns = {name: [row[name] for row in rows] for name in names}
    assert reward([row["text"] for row in rows], [""] * len(rows), **columns) == [row["score"] for row in rows]


@pytest.mark.parametrize(("text", "expected"), [
    ("1+2*3", 7), ("-(4 - 10)/4", 1.5), ("7//2", 3), ("2**3**2", 512), ("2**-1", 0.5), ("(1 +\n2)", 3), ("1.5+.5", 2),
    ("--+3", 3),
])  # fmt: skip
def test_expressions_have_the_value_that_python_gives(text, expected):
    assert value(text) == expected


@pytest.mark.parametrize("text", [
    "", "1+", "x", "__import__('os')", "1/0", "5(3)", "()", "1,2", "...", "007", "1_0", "1e3", "1j", "3 4",
    "(-8)**.5",
])  # fmt: skip
def test_what_is_no_arithmetic_is_refused(text):
    with pytest.raises(NotArithmetic):
        value(text)


@pytest.mark.parametrize(
    "text", ["9**9**9", "99**999999", "(" * 900 + ")" * 90, "-" * 999 + "1", "1" * 2000, "9" * 999]
)
def test_expressions_that_would_take_for_ever_are_refused_or_done_at_once(text):
    assert countdown([f"<answer>{text}</answer>"], [""], numbers=[[9, 9, 9]], target=[1]) == [0.1]


@pytest.mark.parametrize(("text", "score"), [
    ("<answer>(7 + 3) * 5</answer>", 1.0),
    ("<answer>\n3*5+7*5\n</answer>", 0.1),  # one number twice
    ("<answer>(7+3)*5 = 50</answer>", 0.1),  # an equation is not an expression
    ("<answer>50</answer>", 0.1),
    ("<answer>5*(7+3)</answer><answer>no</answer>", 0.1),  # the last one counts
    ("<answer>5*(7+3)", 0.0),  # an open tag is not an answer
    ("5*(7+3)", 0.0),
])  # fmt: skip
def test_countdown_wants_every_number_once_between_the_last_tags(text, score):
    assert countdown([text], [""], numbers=["7,3,5"], target=["50"]) == [score]
    assert countdown([text], [""], numbers=[[5, 3, 7]], target=[50]) == [score]


def test_a_bare_text_is_its_own_answer():
    columns = {"numbers": [[7, 3, 5]] * 3, "target": [50] * 3, "bare": [True] * 3}
    assert countdown(["5*(7+3) ", "", "<answer>1</answer>"], [""] * 3, **columns) == [1.0, 0.0, 0.1]
    assert answer_of("<answer> 4 </answer>") == "4"
    assert answer_of("4", None) is None


def test_sudoku_reads_digits_in_any_layout_and_ignores_given_cells():
    puzzle, solution = "0234341221434320", "1234341221434321"
    texts = ["1234 3412 2143 4321", "1999999999999999", "9999 9999 9999 9991 1", "12"]
    columns = {"puzzle": [puzzle] * 4, "solution": [solution] * 4, "bare": [True] * 4}
    assert sudoku(texts, [""] * 4, **columns) == [1.0, 0.5, 0.5, 0.5]
    with pytest.raises(ValueError, match="16 digits"):
        sudoku(["<answer>1</answer>"], [""], puzzle=["123"], solution=["1234"])


@pytest.mark.parametrize(("text", "score"), [
    ("-12", 1.0), (" -12\n", 1.0), ("-012", 1.0), ("12", 0.0), ("-12.", 0.0), ("5-17=-12", 0.0), ("9" * 5000, 0.0),
    ("", 0),
])  # fmt: skip
def test_arithmetic_wants_the_integer_alone(text, score):
    assert arithmetic([text], [""], [-12], [True]) == [score]
    assert arithmetic([f"so <answer>{text}</answer>"], [""], ["-12"]) == [score]


def test_rows_of_other_tasks_do_not_concern_a_reward_and_solved_covers_all():
    texts = ["1+2+3", "1234341221434321", "12", "1+2*3", "1234341221434322", "words"]
    columns = {
        "bare": [True] * 6,
        "numbers": [[1, 2, 3], None, None, [1, 2, 3], None, None],
        "target": [6, None, None, 6, None, None],
        "puzzle": [None, "0234341221434320", None, None, "0234341221434320", None],
        "solution": [None, "1234341221434321", None, None, "1234341221434321", None],
        "answer": [None, None, 12, None, None, None],
    }
    prompts = [""] * 6
    given = countdown(texts, prompts, **{name: columns[name] for name in ("numbers", "target", "bare")})
    assert given[1:4] == [None, None, 0.1]
    assert solved(texts, prompts, **columns) == [1.0, 1.0, 1.0, 0.0, 0.0, None]
    through = rewards.load("solved")(texts, prompts, columns)
    assert through[:5].tolist() == [1.0, 1.0, 1.0, 0.0, 0.0]
    assert through[5].isnan()


def test_tags_are_counted_once_each_and_what_follows_costs():
    whole = "<reasoning>\nx\n</reasoning>\n<answer>\n4\n</answer>\n"
    texts = [whole, whole + "0123456789", "<answer>4</answer>", whole + whole, "<answer></answer>" + "x" * 999]
    assert tags(texts, [""] * 5) == pytest.approx([0.5, 0.49, 0.25, 0.0, 0.0])


@pytest.mark.parametrize(("text", "score"), [
    ("<reasoning>\na\nb\n</reasoning>\n<answer>\n1,000\n</answer>\n", 3.5),  # right, but not digits alone
    ("<reasoning>\na\n</reasoning>\n<answer>\n1000\n</answer>\n", 4.0),
    ("<reasoning>a</reasoning> <answer>1000</answer>", 3.5), ("<reasoning>a</reasoning> <answer>999</answer>", 1.5),
    ("<answer>1000</answer>", 2.75),
    ("<reasoning>a</reasoning><answer>1000", 0.375 + 2.5),  # an open tag: no format, but an answer
    ("<reasoning>a</reasoning><answer>1,000 eggs", 0.375 + 2.0),
    ("1000", 2.5),  # as d1: without a tag the whole text is the answer
    ("so it is 1000", 0.0), (r"so it is $\boxed{1000}$", 2.5), ("500 * 2 = 1000\n#### 1000", 2.5), ("", 0.0),
])  # fmt: skip
def test_gsm8k_sums_format_and_correctness(text, score):
    assert gsm8k([text], [""], ["She sells 500 * 2 = <<500*2=1000>>1000.\n#### 1,000"]) == [score]
    assert gsm8k([text], [""], ["1000"]) == [score]


@pytest.mark.parametrize("row", RELEASED, ids=lambda row: row["text"][-24:])
def test_grade_school_answers_are_right_where_the_release_that_reads_such_a_mark_says_so(row):
    right = row["right"][row["follows"]]
    assert gsm8k_accuracy([row["text"]], [""], [row["answer"]]) == [float(right)]
    assert gsm8k_accuracy([row["text"]], [""], [f"Six times seven.\n#### {row['answer']}"]) == [float(right)]


@pytest.mark.parametrize(("text", "found"), [
    ("<answer>\n42", "42"), (r"<answer>the sum is \boxed{\text{4{2}}}</answer> of \boxed{7}", r"\text{4{2}}"),
    (r"<reasoning>\boxed{7}</reasoning><answer>42</answer>", "42"), (r"\boxed{4}\boxed{}", None),
    ("#### 42 \nand more", "42"), ("42</answer>", None), ("x", None),
])  # fmt: skip
def test_a_final_answer_is_in_tags_in_a_box_or_after_the_mark(text, found):
    assert final_answer(text) == found


@pytest.mark.parametrize(
    "text", ["<answer>1/2", r"\boxed{84/2} m^2", "<answer>- 3 </answer>", r"#### 1\,042", "1{,}042"]
)
def test_numbers_count_in_every_spelling(text):
    right = {"1/2": "0.5", "84/": "42", "- 3": "-3", "042": "1042"}
    assert gsm8k_accuracy([text], [""], [next(a for part, a in right.items() if part in text)]) == [1.0]


@pytest.mark.parametrize("text", ["<answer>\\frac{1}{2} cup", "<answer>m^2", "<answer>x2</answer>", "<answer>1/2 cup"])
def test_a_digit_of_something_else_is_not_the_answer(text):
    assert gsm8k_accuracy([text], [""], ["2"]) == [0.0]


def test_an_answer_of_thousands_of_digits_is_wrong_and_no_error():
    assert gsm8k(["<answer>" + "9" * 9000 + "</answer>"], [""], ["42"]) == [0.75]
    assert gsm8k_accuracy(["<answer>" + "9" * 9000 + " eggs", "x"], [""] * 2, ["42", None]) == [0.0, None]


@pytest.mark.parametrize(("text", "score"), [
    (r"<reasoning>a</reasoning><answer>\boxed{\dfrac12}</answer>", 3.0),
    (r"<reasoning>\boxed{3}</reasoning><answer>\boxed{\frac{1}{2}}</answer>", 3.0), (r"<answer>0.5</answer>", 2.0),
    (r"so it is \boxed{1/2}.", 2.0), (r"<answer>\boxed{2}</answer>", 0.5), (r"<answer>\dfrac{1}{2}", 2.0),
    ("1/2", 2.0),  # as d1: without a box the whole text is the answer
    ("so it is 1/2", 0.0),
])  # fmt: skip
def test_math_wants_the_last_box(text, score):
    assert math_answer([text], [""], [r"Hence $x = \boxed{\frac{1}{2}}$."]) == [score]
    assert math_answer([text], [""], [r"\frac{1}{2}"]) == [score]


@pytest.mark.parametrize(("one", "other"), [
    (r"\frac{1}{2}", r"\tfrac12"), (r"\frac{1}{2}", ".5"), (r"-\frac{3}{4}", r"\frac{-3}{4}"),
    (r"\frac a{12}", r"\frac{a}{12}"), (r"2\sqrt3", r"2\sqrt{3}"), (r"\left( 1, 2 \right)", "(1,2)"),
    (r"12\text{ cm}", "12"), (r"\text{Monday}", "Monday"), ("1,234,567", "1234567"), (r"90^\circ", "90"),
    (r"x = 7", "7"), (r"\$18.00", "18"), (r"25\%", "25"), ("5.", "5"), (r"\{1,\,2\}", r"\{1,2\}"),
])  # fmt: skip
def test_spellings_of_one_answer_are_the_same(one, other):
    assert latex.same(one, other)
    assert latex.same(other, one)


@pytest.mark.parametrize(("one", "other"), [
    ("12", "1,2"), (r"\frac{1}{0}", r"\frac{2}{0}"), ("(1,2)", "(2,1)"), ("x", "y"), ("", "0"), (r"\sqrt{3}", "3"),
    ("-5", "5"),
])  # fmt: skip
def test_other_answers_are_not(one, other):
    assert not latex.same(one, other)


@pytest.mark.parametrize(
    ("text", "answer", "right"),  # what d1's is_equiv says of the last boxes
    [
        (r"\boxed{\frac{\sqrt{3}}{2}}", r"\boxed{\frac{\sqrt3}{2}}", 1.0),
        (r"\boxed{\frac{\sqrt{3}}{4}}", r"\boxed{\frac{\sqrt3}{2}}", 0.0),
        (r"\boxed{\left(3, \frac{\pi}{2}\right)}", r"so $\boxed{\left( 3, \frac{\pi}{2} \right)}$", 1.0),
        (r"$\boxed 7$ is it", r"\boxed{7}", 1.0),
        (r"\boxed{7}", r"which is $\boxed 7$.", 1.0),
        (r"\boxed{7}, so \boxed{8}", r"\boxed{7}", 0.0),
        (r"\boxed{x=5}", r"\boxed{5}", 1.0),
        (r"\boxed{10\%}", r"\boxed{10}", 1.0),
    ],
)
def test_competition_answers_are_compared_box_by_box(text, answer, right):
    assert math_accuracy([text, text], ["", ""], [answer, None]) == [right, None]


def test_the_last_box_is_found_with_its_braces():
    assert latex.last_boxed(r"\boxed{1} and \boxed{\frac{a}{b}} {x}") == r"\frac{a}{b}"
    assert latex.last_boxed(r"\boxed{\frac{a}{b}") is None
    assert latex.last_boxed("none") is None


@pytest.mark.parametrize(("answer", "expected", "right"), [
    ("1 27", 127, 0.0), ("12\n7", 127, 0.0), ("127", 127, 1.0), (" 127 ", 127, 1.0), ("1 2 7", 127, 0.0),
    ("1 270", 1270, 1.0),
])  # fmt: skip
def test_digits_apart_are_not_one_number_but_thousands_may_be(answer, expected, right):
    assert gsm8k_accuracy([f"<answer>{answer}</answer>"], [""], [str(expected)]) == [right]
