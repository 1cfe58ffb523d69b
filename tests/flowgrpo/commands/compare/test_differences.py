"""What differs between maps."""

import datetime

from flowgrpo.commands.compare.differences import Difference, differences, flat, in_words


def test_keys_are_the_way_to_a_value():
    nested = {"a": {"b": 1, "c": {}}, "d": [{"e": 2}, {"f": None}], "g": [1, 2], "h": [], 3: "x"}
    assert flat(nested) == {"a.b": 1, "a.c": {}, "d.0.e": 2, "d.1.f": None, "g": [1, 2], "h": [], "3": "x"}
    assert flat({}) == {}
    words = in_words({"a": {"when": datetime.date(2026, 1, 31)}, "b": ["é", None]})
    assert words == {"a.when": '"2026-01-31"', "b": '["é", null]'}


def test_what_differs_is_listed_and_what_agrees_is_counted():
    maps = [
        {"run": {"name": "x", "seed": 0}, "same": [1, 2], "rate": 0.1, "flag": True, "only": None},
        {"run": {"name": "y", "seed": 0}, "same": [1, 2], "rate": 0.2, "flag": 1},
    ]
    differing, agreeing = differences([in_words(each) for each in maps], ("run.name",))
    assert differing == [
        Difference("rate", ["0.1", "0.2"]),
        Difference("flag", ["true", "1"]),
        Difference("only", ["null", "–"]),
    ]
    assert agreeing == 2  # run.seed, same
    assert differences([{"a": "1"}, {"a": "1"}, {"a": "2"}]) == ([Difference("a", ["1", "1", "2"])], 0)
