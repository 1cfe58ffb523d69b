"""Several runs on one pair of axes."""

import re

import pytest

from flowgrpo.commands.page_parts.curve import APART, BOTTOM, TOP, Series, chart, marks
from flowgrpo.commands.page_parts.numbers import compact


def two(second):
    return [
        Series(points=[(0, 0.0), (100, 1.0)], kind="c0", dotted=True, mark="A"),
        Series(points=second, kind="c1", dotted=True, mark="B"),
    ]


def places(svg, kind):
    return [tuple(map(float, found)) for found in re.findall(rf'<circle class="{kind}" cx="(\S+)" cy="(\S+)"', svg)]


def test_runs_share_both_axes():
    """The range of x is the longer run's, so the middle of it is the end of a run half as long."""
    svg = chart(two([(0, 1.0), (200, 0.0)]), unit="evaluations")
    (x0, low), (x1, high) = places(svg, "c0")
    (y0, first), (y1, last) = places(svg, "c1")
    assert (x0, low, high) == (y0, last, first)
    assert x1 - x0 == pytest.approx((y1 - y0) / 2, abs=0.1)
    assert "<title>A, 100 evaluations: 1.00</title>" in svg
    assert "<title>B, 200 evaluations: 0.00</title>" in svg
    alone = chart(two([]))  # without points there is neither line nor mark
    assert alone.count("<polyline") == 1
    assert re.findall(r'class="mark (\w+)"[^>]*>(\w)<', alone) == [("c0", "A")]


@pytest.mark.parametrize(
    ("first", "last", "label"), [(0.5, 0.5, "0.5"), (-0.0, -0.0, "0"), (1e-12, 1e-12, "1e-12"), (-3, -3.00000002, "-3")]
)
def test_a_constant_curve_has_one_label_and_its_line_in_the_middle(first, last, label):
    svg = chart([Series(points=[(0, first), (4, last)], kind="c0", dotted=True)], (340, 180))
    assert re.findall(r'text-anchor="end">([^<]*)<', svg) == [label]
    assert [y for _, y in places(svg, "c0")] == pytest.approx([(TOP + 180 - BOTTOM) / 2] * 2, abs=0.1)


def test_a_small_rise_has_an_axis_of_its_own():
    svg = chart([Series(points=[(0, 0.5), (4, 0.501)], kind="c0")])
    assert re.findall(r'text-anchor="end">([^<]*)<', svg) == ["0.5", "0.50025", "0.5005", "0.50075", "0.501"]


def test_marks_of_lines_do_not_cover_each_other_and_stay_on_the_page():
    assert marks({"A": 50.0, "B": 48.0, "C": 150.0}, 200) == {"B": 48.0, "A": 48.0 + APART, "C": 150.0}
    assert marks({}, 200) == {}
    assert marks({"A": 195.0, "B": 195.0}, 200) == {"A": 200.0 - APART, "B": 200.0}
    many = marks(dict.fromkeys("ABCDEFGHIJKLMNOPQRSTU", 100.0), TOP + 200)  # 21 marks stand closer, 10 pixels apart
    assert sorted(many.values()) == pytest.approx([TOP + 10.0 * i for i in range(21)])


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0, "0"), (2.5, "2.5"), (4000, "4000"), (10_000, "10k"), (250_000, "250k"), (1_500_000, "1.5M"), (2e9, "2G")],
)
def test_large_numbers_of_an_axis_are_short(value, shown):
    assert compact(value) == shown
