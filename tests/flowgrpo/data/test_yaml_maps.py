"""Numbers in the YAML of configs, and the place of a mistake."""

import pytest
import yaml

from flowgrpo.data.yaml_maps import parse_yaml
from flowgrpo.errors import InputError


@pytest.mark.parametrize("written", ["0:0.6", "1:30", "1:2:3", "-2:30.5", "190:20:30"])
def test_two_numbers_with_a_colon_are_a_text_and_no_number_of_base_60(written):
    assert parse_yaml(written, "place") == written
    assert isinstance(yaml.safe_load(written), int | float)  # as YAML 1.1 has it


@pytest.mark.parametrize(
    ("written", "value"),
    [("3e-4", 3e-4), ("0.6", 0.6), ("-7", -7), ("0x1f", 31), ("0o17", "0o17"), (".inf", float("inf")), ("1_000", 1000)],
)
def test_other_numbers_are_numbers(written, value):
    assert parse_yaml(written, "place") == value
    assert parse_yaml(f"a: {written}", "place") == {"a": value}


@pytest.mark.parametrize(
    ("written", "line", "end"),
    [
        (
            "model: {path: shapes}\ntrain: {iterations: 1,\nrun:\n  dir: x\n",
            4,
            "; the bracket of line 2 is still open there",
        ),
        ("a: [{b: 1},\n  {c: 2}\nd: 3\n", 3, "; the bracket of line 1 is still open there"),
        ("a: 1\nb: {c: 1 d: 2}\n", 2, ""),
    ],
)
def test_a_bracket_that_an_earlier_line_opens_is_named(written, line, end):
    with pytest.raises(InputError, match=rf"^place:{line}: not valid YAML \(expected .*\){end}$"):
        parse_yaml(written, "place")
