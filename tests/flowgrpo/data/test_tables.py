"""JSON of others: a line, a log and a document are read, or refused in one sentence that names the place."""

import decimal
import json
import re
from functools import partial
from pathlib import Path

import numpy as np
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


ROWS = [{"prompt": "a red fox", "n": "1"}, {"prompt": "ein blauer Würfel", "n": None}]
SEPARATED = "prompt{0}n\na red fox{0}1\nein blauer Würfel{0}\n"
WRITTEN = {
    "a.csv": SEPARATED.format(","),
    "b.csv": SEPARATED.format(";"),
    "c.tsv": SEPARATED.format("\t"),
    "d.json": json.dumps(ROWS, ensure_ascii=False),
    "e.jsonl": "\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS),
    "F.CSV": SEPARATED.format(",").replace("\n", "\r"),
    "g.csv": SEPARATED.format(";").replace("\n", "\r"),
    "h.csv": "sep=;\r\n" + SEPARATED.format(";").replace("\n", "\r\n"),
    "i.csv": '"sep=,"\n' + SEPARATED.format(","),
    "j.csv": "n ; prompt \n1;a red fox\n;ein blauer Würfel\n",
    "k.tsv": "sep=\t\n" + SEPARATED.format("\t"),
}


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-be"])
@pytest.mark.parametrize("name", WRITTEN)
def test_a_table_in_any_layout_and_encoding_has_the_same_rows(tmp_path, name, encoding):
    mark = "\ufeff" if encoding == "utf-16-be" else ""  # which Python writes for utf-16 by itself
    (tmp_path / name).write_bytes((mark + WRITTEN[name]).encode(encoding))
    assert [row for _, row in tables.rows(tmp_path / name, "key", needed="prompt")] == ROWS


def test_an_array_of_texts_is_a_column_of_prompts(tmp_path):
    (tmp_path / "a.json").write_text('["a cat", "a dog"]')
    found = tables.rows(tmp_path / "a.json", "key")
    assert found == [(f"{tmp_path}/a.json:1", {"prompt": "a cat"}), (f"{tmp_path}/a.json:2", {"prompt": "a dog"})]


@pytest.mark.parametrize(
    ("first", "needed", "names"),
    [
        ("prompt;a,b", "prompt", ["prompt", "a,b"]),
        ("prompt,a;b", "prompt", ["prompt", "a;b"]),
        ("prompt", "prompt", ["prompt"]),
        ("text;n", "prompt", ["text", "n"]),
        ("text,n", None, ["text", "n"]),
        ("prompt, n", "prompt", ["prompt", "n"]),
    ],
)
def test_the_first_line_of_a_csv_file_tells_its_delimiter(tmp_path, first, needed, names):
    (tmp_path / "a.csv").write_text(f"{first}\nx\n")
    ((_, row),) = tables.rows(tmp_path / "a.csv", "key", needed=needed)
    assert list(row) == names


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.csv", b"prompt,n,n\na,1,2\n", r"a\.csv:1: two columns are called 'n'"),
        ("a.tsv", b"prompt\tprompt\na\tb\n", r"a\.tsv:1: two columns are called 'prompt'"),
        ("a.csv", b"text;a,b\nx;y,z\n", r"a\.csv:1: the first line has both commas and semicolons"),
        ("a.csv", b"sep=|\nprompt|n\na|1\n", r"a\.csv:1: declares '\|' as its delimiter, take one of ',', ';'"),
        ("a.csv", b"sep=;\nprompt;n\na;1;2\n", r"a\.csv:3: the row has more cells"),
        (
            "a.csv",
            b"prompt;n\na;1;2\n",
            r"a\.csv:2: the row has more cells .* \(prompt, n\); quote cells that hold ';'",
        ),
        ("a.jsonl", b'{"prompt": "a", "prompt": "b"}', r"a\.jsonl:1: the key 'prompt' stands there twice"),
        ("a.jsonl", b'{"prompt": "a", "x": {"y": 1, "y": 2}}', r"a\.jsonl:1: the key 'y' stands there twice"),
        ("a.json", b'[{"prompt": "a", "prompt": "b"}]', r"a\.json: the key 'prompt' stands there twice"),
        ("a.json", b'{"prompt": "a"}', r"a\.json: holds an object, not an array of texts or of objects such as"),
        ("a.json", b'"a"', r"a\.json: holds str, not an array"),
        ("a.json", b"[1]", r"a\.json:1: a row is an object such as .*, not int"),
        ("a.json", b'[{"prompt": "a"}, null]', r"a\.json:2: a row is an object such as .*, not NoneType"),
        ("a.txt", b"a\0b", r"key: .*a\.txt is not UTF-8 text \(it holds zero bytes\); save it as UTF-8"),
        ("a.csv", "prompt\nWürfel".encode("latin1"), r"key: .*a\.csv is not UTF-8 text \(byte 8\); save it as UTF-8"),
        ("a.txt", b"\xff\xfea", r"key: .*a\.txt is not UTF-8 text \(byte 0\)"),
    ],
)
def test_a_table_that_is_not_clear_is_one_sentence(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    read = tables.lines if name.endswith(".txt") else partial(tables.rows, needed="prompt")
    with pytest.raises(InputError, match=said):
        read(tmp_path / name, "key")


def parquet(path, **columns):
    arrow, writer = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    writer.write_table(arrow.table(columns), path)
    return path


def test_a_table_as_pandas_writes_it_becomes_plain_data(tmp_path):
    """Nanoseconds, time zones, decimals, categories, and lists and maps of these."""
    arrow = pytest.importorskip("pyarrow")
    stamp, said = 1_704_067_200_123_456_789, "2024-01-01 00:00:00.123456789"
    columns = {
        "when": arrow.array([stamp], arrow.timestamp("ns")),
        "there": arrow.array([stamp], arrow.timestamp("ns", tz="UTC")),
        "day": arrow.array([19723], arrow.date32()),
        "hour": arrow.array([3_600_000_000_001], arrow.time64("ns")),
        "long": arrow.array([1500], arrow.duration("ns")),
        "price": arrow.array([decimal.Decimal("1.25")]),
        "kind": arrow.array(["fox"]).dictionary_encode(),
        "half": arrow.array(np.array([0.5], np.float16)),
        "every": arrow.array([[stamp, None]], arrow.list_(arrow.timestamp("ns"))),
        "inner": arrow.array([{"at": stamp}], arrow.struct([("at", arrow.timestamp("ns"))])),
        "pairs": arrow.array([[("at", stamp)]], arrow.map_(arrow.string(), arrow.timestamp("ns"))),
        "picture": arrow.array([b"\xff"]),
        "absent": arrow.nulls(1),
    }
    ((_, row),) = tables.rows(parquet(tmp_path / "a.parquet", prompt=["a"], **columns), "key", needed="prompt")
    assert row == {
        **{"prompt": "a", "when": said, "there": f"{said}Z", "day": "2024-01-01", "hour": "01:00:00.000000001"},
        **{"long": 1500, "price": 1.25, "kind": "fox", "half": 0.5, "absent": None},
        **{"every": [said, None], "inner": {"at": said}, "pairs": [("at", said)]},
    }
    json.dumps(row)
    kept = Path(__file__).parents[2] / "data" / "nanoseconds.parquet"  # by pandas itself
    assert {row["when"] for _, row in tables.rows(kept, "key")} == {said}


@pytest.mark.parametrize("kind", ["binary", "large_binary", "fixed_size_binary[1]"])
def test_a_column_of_bytes_that_is_needed_is_named_as_such(tmp_path, kind):
    arrow = pytest.importorskip("pyarrow")
    types = {"binary": arrow.binary(), "large_binary": arrow.large_binary(), "fixed_size_binary[1]": arrow.binary(1)}
    path = parquet(tmp_path / "a.parquet", prompt=arrow.array([b"a"], types[kind]), other=["b"])
    said = rf"a\.parquet: the column 'prompt' holds bytes \({re.escape(kind)}\), not texts"
    with pytest.raises(InputError, match=said):
        tables.rows(path, "key", needed="prompt")
    assert [row for _, row in tables.rows(path, "key", needed="other")] == [{"other": "b"}]


def test_two_columns_of_one_name_in_a_parquet_file_are_refused(tmp_path):
    arrow, writer = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    two = arrow.Table.from_arrays([arrow.array(["a"]), arrow.array(["b"])], names=["prompt", "prompt"])
    writer.write_table(two, tmp_path / "a.parquet")
    with pytest.raises(InputError, match=r"a\.parquet: two columns are called 'prompt'"):
        tables.rows(tmp_path / "a.parquet", "key")


def test_lines_may_end_as_on_any_system(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"a\rb\r\nc\n")
    assert tables.lines(tmp_path / "a.txt", "key") == [(1, "a"), (2, "b"), (3, "c")]


@pytest.mark.parametrize("name", ["a.txt", "a.csv", "a.json", "a.jsonl", "a.parquet"])
def test_a_pointer_in_the_place_of_a_table_is_named_as_such(tmp_path, name):
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 12345\n")
    read = tables.lines if name == "a.txt" else tables.rows
    with pytest.raises(InputError, match=rf"{name} is a Git LFS pointer, not the file itself; run git lfs pull"):
        read(tmp_path / name, "key")


def test_columns_whose_names_alone_speak_of_bytes_are_read():
    pyarrow = pytest.importorskip("pyarrow")

    class Named(pyarrow.ExtensionType):
        def __init__(self, storage):
            super().__init__(storage, "binary.by.name")

        def __arrow_ext_serialize__(self):
            return b""

    codes = pyarrow.int32()
    for text, data in ((pyarrow.string(), pyarrow.binary()), (pyarrow.large_string(), pyarrow.large_binary())):
        for make in (Named, lambda of: pyarrow.dictionary(codes, of), lambda of: pyarrow.struct([("binary", of)])):
            assert not tables._holds_bytes(make(text))
            assert tables._holds_bytes(make(data))


def test_columns_that_hold_bytes_are_known_by_their_types(tmp_path):
    image, meta = {"bytes": b"x", "path": "a.png"}, {"is_binary": 3}
    path = parquet(tmp_path / "a.parquet", prompt=["a"], image=[image], meta=[meta], images=[[b"x"]])
    assert [row for _, row in tables.rows(path, "key")] == [{"prompt": "a", "meta": meta}]
