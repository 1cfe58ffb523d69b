"""Errors of means, of ratios and of pairs against formulas by hand."""

import math
from statistics import stdev

import pytest

from flowgrpo.commands.evaluations.results import Scored
from flowgrpo.commands.evaluations.statistics import difference, in_order, mean_of, ratio, summarise


def scored(index, value, categories=(), sample=0, answers=()):
    answers = {"mine": list(answers)} if answers else {}
    return Scored(
        file=f"{index}-{sample}", prompt=f"p{index}", index=index, sample=sample, seed=index,
        categories=list(categories), rewards={"mine": value}, answers=answers,
    )  # fmt: skip


def test_the_error_of_a_mean_is_that_of_prompts_whose_samples_are_averaged_first():
    values = [(1.0, 2.0), (2.0, 2.0), (5.0, 1.0), (0.0, 1.0)]
    samples = [scored(i, value, sample=j) for i, pair in enumerate(values) for j, value in enumerate(pair)]
    total = summarise(samples, "mine", "prompts").total
    means = [1.5, 2.0, 3.0, 0.5]
    assert (total.n, total.mean) == (4, 1.75)
    assert total.error == pytest.approx(stdev(means) / 2)


def test_the_error_of_a_ratio_is_cochrans():
    """Marks 1 of 2 and 3 of 3: the ratio is 4/5, residuals are 1 - 1.6 and 3 - 2.4."""
    found = ratio("x", [(0, [1.0, 0.0]), (1, [1.0, 1.0, 1.0])])
    assert (found.mean, found.n) == (0.8, 2)
    assert found.error == pytest.approx(math.sqrt(2 * (0.36 + 0.36)) / 5)
    assert ratio("x", [(0, [1.0, 0.0])]).error is None


def test_a_mean_of_categories_counts_a_prompt_once():
    values = {"a": [0.0, 1.0, 1.0], "b": [3.0, 5.0]}
    samples = [scored(i, v, ["a"]) for i, v in enumerate(values["a"])]
    samples += [scored(3 + i, v, ["b"]) for i, v in enumerate(values["b"])]
    apart = summarise(samples, "mine", "categories")
    errors = [stdev(v) / math.sqrt(len(v)) for v in values.values()]
    assert [each.error for each in apart.categories] == pytest.approx(errors)
    assert apart.total.mean == pytest.approx((2 / 3 + 4) / 2)
    assert apart.total.error == pytest.approx(math.hypot(*errors) / 2)
    twice = summarise([scored(i, v, ["a", "b"]) for i, v in enumerate(values["a"])], "mine", "categories")
    assert twice.total.error == pytest.approx(errors[0])  # both are of the same prompts: no smaller than one alone
    assert twice.total.n == 3


def test_the_difference_of_the_same_prompts_has_the_error_of_pairs():
    first, second = [0.0, 1.0, 4.0, 2.0], [1.0, 1.0, 6.0, 2.5]
    a, b = (summarise([scored(i, v) for i, v in enumerate(each)], "mine", "prompts").total for each in (first, second))
    found = difference(a, b)
    gains = [after - before for before, after in zip(first, second, strict=True)]
    assert found.mean == pytest.approx(sum(gains) / 4)
    assert found.error == pytest.approx(stdev(gains) / 2)
    assert found.error < math.hypot(a.error, b.error) / 2
    assert difference(a, a).error == 0.0


def test_questions_are_marks_of_their_own_categories_and_the_total_is_the_score():
    answers = [(["A", "A - x"], 1.0), (["A", "A - y"], 0.0), (["B"], 1.0)]
    samples = [
        scored(0, 0.5, ["z"], answers=answers),
        scored(1, 1.0, ["z"], answers=[(["B"], 1.0), (["A", "A - x"], 1.0)]),
    ]
    by_prompts = summarise(samples, "mine", "prompts")
    assert [(each.name, each.n, each.mean) for each in by_prompts.categories] == [
        ("A", 2, pytest.approx(2 / 3)), ("A - x", 2, 1.0), ("A - y", 1, 0.0), ("B", 2, 1.0),
    ]  # fmt: skip
    assert by_prompts.total.mean == 0.75
    assert summarise(samples, "mine", "categories").total.mean == pytest.approx((2 / 3 + 1) / 2)  # of A and B alone
    plain = summarise([scored(0, 0.5, ["z"], answers=[([], 1.0)])], "mine", "prompts")
    assert [each.name for each in plain.categories] == ["z"]


def test_samples_without_a_score_are_counted_and_left_out():
    found = summarise(
        [scored(0, 1.0, ["a"]), scored(0, None, ["a"], sample=1), scored(1, None, ["a"])], "mine", "prompts"
    )
    assert (found.unscored, found.total.n, found.total.mean, found.total.error) == (2, 1, 1.0, None)
    nothing = summarise([scored(0, None, ["a"])], "mine", "categories")
    assert (nothing.total, nothing.categories, nothing.unscored) == (None, [], 1)


def test_categories_below_another_come_behind_it():
    assert in_order(["A - x", "B", "A", "C - y", "属性-数量", "属性"]) == [
        "B",
        "A",
        "A - x",
        "C - y",
        "属性",
        "属性-数量",
    ]


@pytest.mark.parametrize(
    ("categories", "overlaps"), [([["a"], ["b"]], False), ([["A", "A - x"], ["A"]], False), ([["a", "b"], ["b"]], True)]
)
def test_a_prompt_of_several_categories_is_told_from_one_below_another(categories, overlaps):
    samples = [scored(index, 1.0, names) for index, names in enumerate(categories)]
    assert summarise(samples, "mine", "prompts").overlaps is overlaps


def test_a_mean_of_a_category_without_an_error_has_none():
    found = mean_of("x", [ratio("a", [(0, [1.0]), (1, [0.0])]), ratio("b", [(2, [1.0])])])
    assert (found.n, found.mean, found.error) == (3, 0.75, None)
