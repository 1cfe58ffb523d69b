"""Numbers as pages and commands print them."""

from flowgrpo.commands.page_parts.numbers import counted


def test_one_is_singular():
    assert [counted(number, "sample") for number in (0, 1, 2)] == ["0 samples", "1 sample", "2 samples"]
    assert counted(2, "process", "es") == "2 processes"
