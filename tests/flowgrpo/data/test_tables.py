"""JSON of others: a line, a log and a document are read, or refused in one sentence that names the place."""

import json

import pytest

from flowgrpo.data import tables
from flowgrpo.errors import InputError

HALF = r'"a \ud800 b"'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[" * 100_000, "nested deeper than 64"),
        ("[" * 65 + "]" * 65, "nested deeper than 64"),
        ('{"a":' * 65 + "1" + "}" * 65, "nested deeper than 64"),
        (HALF, r"the text 'a \\ud800 b' has half a character"),
        (f'{{"x": [{HALF}]}}', "has half a character"),
        (f"{{{HALF}: 1}}", "has half a character"),
        ("9" * 5000, "not valid JSON"),
        ('{"a": 1', "not valid JSON"),
    ],
)
def test_what_no_step_can_take_is_one_sentence(text, said):
    with pytest.raises(InputError, match=f"^place: .*{said}") as error:
        tables.value(text, "place")
    assert "\n" not in str(error.value)


def test_as_deep_as_allowed_and_whole_characters_pass():
    assert json.dumps(tables.value("[" * 64 + "]" * 64, "place")) == "[" * 64 + "]" * 64
    assert tables.value(r'"\ud83d\ude00"', "place") == "\N{GRINNING FACE}"


@pytest.mark.parametrize("cut", ['{"step": 7, "pha', '{"step"', "\0\0\0\0", '{"a": "\\u00', "\x80\xff", "[1]"])
@pytest.mark.parametrize("end", ["", "\n"])
def test_a_last_line_that_was_cut_off_is_left_out_with_a_warning(tmp_path, cut, end):
    (tmp_path / "a.jsonl").write_bytes(b'{"n": 1}\n{"n": 2}\n' + (cut + end).encode("latin1"))
    with pytest.warns(UserWarning, match=r"a\.jsonl:3: .* it is the last line, cut off, and left out"):
        assert [row for _, row in tables.log(tmp_path / "a.jsonl")] == [{"n": 1}, {"n": 2}]


@pytest.mark.filterwarnings("error")
def test_a_whole_last_line_counts_with_its_line_break_or_without(tmp_path):
    for text in ('{"n": 1}\n{"n": 2}', '{"n": 1}\n\n{"n": 2}\n\n'):
        (tmp_path / "a.jsonl").write_text(text)
        assert [row for _, row in tables.log(tmp_path / "a.jsonl")] == [{"n": 1}, {"n": 2}]
    assert tables.log(tmp_path / "none.jsonl") == []


def test_a_broken_line_in_the_middle_is_one_sentence(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"n": 1}\n{"n": \n{"n": 3}\n')
    with pytest.raises(InputError, match=r"a\.jsonl:2: not valid JSON"):
        tables.log(tmp_path / "a.jsonl")


def test_large_files_and_files_that_cannot_be_read_are_one_sentence(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_text('{"prompt": "a"}\n')
    with pytest.raises(InputError, match="/proc/self/mem: cannot be read"):
        tables.lines(type(tmp_path)("/proc/self/mem"), "key")
    monkeypatch.setattr(tables, "LARGEST", 10)
    for read in (tables.log, lambda path: tables.rows(path, "key"), tables.document):
        with pytest.raises(InputError, match="has 16 bytes, at most 10 are read"):
            read(tmp_path / "a.jsonl")
