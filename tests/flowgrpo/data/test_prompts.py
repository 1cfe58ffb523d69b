import json

import pytest

from flowgrpo.data import prompts
from flowgrpo.data.prompts import Prompt, shuffle
from flowgrpo.errors import InputError
from flowgrpo.schema.sections import Prompts


def test_a_text_file_is_one_prompt_per_line(tmp_path):
    (tmp_path / "p.txt").write_text("a red circle\n\n  a blue square  \n")
    assert prompts.load(str(tmp_path / "p.txt")) == [Prompt("a red circle"), Prompt("a blue square")]


def test_a_jsonl_file_carries_columns(tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "a", "count": 2}\n{"prompt": "b", "tag": "x"}\n')
    loaded = prompts.load(str(tmp_path / "p.jsonl"))
    assert [p.columns for p in loaded] == [{"count": 2, "tag": None}, {"count": None, "tag": "x"}]


def test_only_line_feeds_end_a_line_and_a_byte_order_mark_is_none_of_it(tmp_path):
    (tmp_path / "p.jsonl").write_text('\ufeff{"prompt": "a\u2028b"}\r\n{"prompt": "c"}\r\n', encoding="utf-8")
    assert prompts.load(str(tmp_path / "p.jsonl")) == [Prompt("a\u2028b"), Prompt("c")]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("p.jsonl", b'{"prompt": "fine"}\n{oops', "p.jsonl:2: not valid JSON"),
        ("p.jsonl", b'{"prompt": "fine"}\n"text"', "p.jsonl:2: a row is an object"),
        ("p.jsonl", b'{"prompt": "fine"}\n{"promt": "x"}', "p.jsonl:2: the row has no key 'prompt', it has promt"),
        ("p.jsonl", b'{"prompt": "fine"}\n{"prompt": 3}', "p.jsonl:2: prompt is 3, not a text"),
        ("p.jsonl", b'{"prompt": "fine"}\n{"prompt": "  "}', "p.jsonl:2: prompt is '  ', not a text"),
        ("p.csv", b"prompt,n\na,1\na cup, a dog,2\n", r"p.csv:3: the row has more cells .* names \(prompt, n\)"),
        ("p.csv", b'prompt\n"never closed\n', r"p.csv:\d: not a line of a .csv file"),
        ("p.csv", b"prompt,n\n,1\n", "p.csv:2: prompt is None, not a text"),
        ("p.csv", b"prompt\n", "holds no prompt"),
        ("empty.txt", b"\n", "holds no prompt"),
        ("table.xlsx", b"x\n", "neither a .txt file"),
        ("latin.txt", b"caf\xe9\n", "not UTF-8"),
        ("promts.txt", None, r"there is no file .*did you mean '[^.]*/prompts.txt'"),
    ],
)
def test_a_file_that_is_missing_or_wrong_is_one_sentence(tmp_path, name, content, said):
    (tmp_path / "prompts.txt").write_text("x\n")
    (tmp_path / "._promts.txt").write_bytes(b"\0\5\x16\7")  # of macOS, which nobody means
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=said):
        prompts.load(str(tmp_path / name))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("prompts.txt", "prompts.txt; write one prompt a line into it, or take a built-in set such as shapes:train$"),
        ("prompts.csv", "prompts.csv; write it, or take a built-in set such as shapes:train$"),
        ("colors.txt", "colors.txt, did you mean '.*colours.jsonl'"),
    ],
)
def test_where_no_file_is_of_a_similar_name_a_missing_one_is_to_be_written(tmp_path, name, said):
    (tmp_path / "colours.jsonl").write_text('{"prompt": "red"}\n')
    with pytest.raises(InputError, match=said):
        prompts.load(str(tmp_path / name))


def test_iterations_walk_through_shuffled_passes():
    drawn = [shuffle(10, 4, 0, i) for i in range(5)]
    flat = [place for places in drawn for place in places]
    assert sorted(flat[:10]) == sorted(flat[10:]) == list(range(10))
    assert flat[:10] != flat[10:]
    assert shuffle(10, 4, 0, 3) == drawn[3]
    assert shuffle(10, 4, 1, 0) != drawn[0]


def test_tables_of_every_kind_are_read_with_the_column_that_holds_the_prompt(tmp_path):
    rows = [{"caption": "a fox, red", "prompt": "other", "n": 1}, {"caption": "a cat", "prompt": "other", "n": None}]
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    parquet.write_table(arrow.Table.from_pylist([row | {"jpg": b"\xff"} for row in rows]), tmp_path / "p.parquet")
    (tmp_path / "p.csv").write_text('\ufeffcaption,prompt,n\r\n"a fox, red",other,1\r\na cat,other,\r\n')
    for suffix, one in ((".jsonl", 1), (".parquet", 1), (".csv", "1")):
        section = Prompts(train=str(tmp_path / f"p{suffix}"), column="caption")
        found = prompts.load_split(section, "train")
        assert [(p.text, p.columns) for p in found] == [("a fox, red", {"n": one}), ("a cat", {"n": None})]
        with pytest.raises(InputError, match=r"the row has no key 'text', it has caption, .*; prompts.column .* names"):
            prompts.load(str(tmp_path / f"p{suffix}"), column="text")


def test_pictures_that_a_csv_names_are_looked_for_beside_it(tmp_path):
    (tmp_path / "fox.png").write_bytes(b"")
    (tmp_path / "p.csv").write_text("prompt,image\nmake it snow,fox.png\n")
    assert prompts.load(str(tmp_path / "p.csv"))[0].columns == {"image": str(tmp_path / "fox.png")}
