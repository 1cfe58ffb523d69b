"""GSM8K and MATH as they are given out: found, read, put into templates, or refused in a sentence."""

import json
import sys

import pytest

from flowgrpo.data import prompts
from flowgrpo.data.generators import templates
from flowgrpo.errors import InputError
from flowgrpo.mdlm.config import TextPrompts
from rewards.texts.text import gsm8k, math_answer

EGGS = {
    "question": "A hen lays 6 eggs a day. How many are that in a week of 7 days? ",
    "answer": "It lays 6 * 7 = <<6*7=42>>42 eggs.\nThat is all.\n#### 42",
}
PAY = {"question": "Two earn $521 each. What do they earn?", "answer": "521 * 2 = 1042\n#### 1,042"}
HALF = {
    "problem": "What is half of $\\frac{2}{3}$?",
    "level": "Level 1",
    "solution": "It is $\\frac{2}{3} \\cdot \\frac{1}{2} = \\boxed{\\frac{1}{3}}$.",
    "type": "Prealgebra",
}
POINT = {"problem": "Where is it?", "solution": "It is at $\\boxed{(1, 2)}$.", "answer": "(1, 2)"}
POINT |= {"subject": "Geometry", "level": 2, "unique_id": "test/geometry/1.json"}  # as MATH-500 has them


def jsonl(path, *rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def parquet(path, *rows):
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(arrow.Table.from_pylist(list(rows)), path)


@pytest.fixture
def data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path / "data"


def columns(found):
    return [prompt.columns for prompt in found]


@pytest.mark.parametrize("file", ["gsm8k/train.jsonl", "gsm8k/grade_school_math/data/train.jsonl"])
def test_gsm8k_is_read_from_the_files_of_its_home(data, file):
    jsonl(data / file, EGGS, PAY)
    jsonl(data / "gsm8k/train_socratic.jsonl", {"question": "other", "answer": "#### 1"})
    found = prompts.load("gsm8k:train")
    assert [p.text for p in found] == [EGGS["question"].strip(), PAY["question"]]
    read = {"42": "It lays 6 * 7 = 42 eggs.\nThat is all.", "1,042": "521 * 2 = 1042"}
    assert columns(found) == [{"answer": answer, "completion": text} for answer, text in read.items()]


def test_gsm8k_is_read_from_the_parquet_files_of_the_hub(data):
    parquet(data / "gsm8k/main/test-00000-of-00001.parquet", EGGS, PAY)
    parquet(data / "gsm8k/socratic/test-00000-of-00001.parquet", {"question": "other", "answer": "#### 1"})
    jsonl(data / "same.jsonl", EGGS, PAY)
    assert prompts.load("gsm8k:test") == prompts.load("gsm8k:data/same.jsonl")
    assert columns(prompts.load("gsm8k:test")) == columns(prompts.load("gsm8k:data/same.jsonl"))
    (data / "gsm8k/train.parquet").write_text("<html>")
    with pytest.raises(InputError, match=r"prompts: data/gsm8k/train.parquet is not a readable parquet file \("):
        prompts.load("gsm8k:train")


def test_without_pyarrow_a_parquet_file_is_refused_and_a_jsonl_file_is_not(data, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    jsonl(data / "gsm8k/train.jsonl", EGGS)
    jsonl(data / "gsm8k/test.parquet", EGGS)
    assert len(prompts.load("gsm8k:train")) == 1
    with pytest.raises(InputError, match=r"prompts.eval: data/gsm8k/test.parquet needs pyarrow .*flowgrpo\[parquet\]"):
        prompts.load("gsm8k:test", "prompts.eval")


def test_math_keeps_its_columns_and_the_answer_comes_from_the_box(data):
    jsonl(data / "math/train.jsonl", HALF)
    (found,) = prompts.load("math:train")
    assert found.text == HALF["problem"]
    kept = {name: HALF[name] for name in ("level", "solution", "type")}
    read = {"answer": r"\frac{1}{3}", "completion": r"It is $\frac{2}{3} \cdot \frac{1}{2} ="}
    assert found.columns == kept | read


def test_math_has_a_folder_for_each_subject_or_one_file_of_500(data):
    parquet(data / "math/algebra/train-00000-of-00001.parquet", HALF)
    parquet(data / "math/geometry/train-00000-of-00001.parquet", HALF | {"solution": r"\boxed{5}"})
    assert [c["answer"] for c in columns(prompts.load("math:train"))] == [r"\frac{1}{3}", "5"]
    jsonl(data / "math/test.jsonl", POINT)
    (found,) = prompts.load("math:test")
    assert [found.columns[name] for name in ("answer", "completion", "subject")] == ["(1, 2)", "It is at $", "Geometry"]


def test_another_folder_and_a_file_of_any_name_can_be_named(data, tmp_path):
    jsonl(tmp_path / "mine/gsm8k/train.jsonl", EGGS)
    section = TextPrompts(train="gsm8k:train", eval="gsm8k:mine/gsm8k/train.jsonl", folder="mine", template="boxed")
    train, held_out = (prompts.load_split(section, split) for split in ("train", "eval"))
    assert train == held_out
    assert train[0].text.startswith(EGGS["question"].strip() + "\n")
    assert r"\boxed{}" in train[0].text


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("gsm8k:train", "gsm8k:train looks in data/gsm8k for train.jsonl or a copy of openai/gsm8k .*and"),
        (
            "math:test",
            "math:test looks in data/math for test.jsonl or a copy of EleutherAI/hendrycks_math .*math:path/to/t",
        ),
        (
            "gsm8k:eval",
            "gsm8k:eval is neither a split of gsm8k nor a .jsonl, .* or .parquet file, did you mean 'gsm8k:t",
        ),
        ("gsm8k:there.jsonl", "there is no file there.jsonl"),
        ("gms8k:train", "there is no file gms8k:train, did you mean 'gsm8k:train'"),
    ],
)
def test_what_is_not_there_is_named_with_the_place_it_was_looked_for(data, source, said):
    with pytest.raises(InputError, match=f"^prompts.train: {said}"):
        prompts.load(source, "prompts.train")


@pytest.mark.parametrize(
    ("name", "row", "said"),
    [
        ("gsm8k", {"prompt": "x", "answer": "#### 1"}, "the row has no key 'question', it has prompt, answer"),
        ("gsm8k", {"question": "x", "answer": "It is 1."}, "answer is 'It is 1.', GSM8K's end with ####"),
        ("math", {"problem": "x", "solution": "1"}, r"the solution has no \\boxed answer"),
        ("math", {"problem": "x", "answer": 3}, "answer is 3, not a text"),
        ("geneval", {"prompt": "a photo", "include": "bench"}, "include is 'bench', GenEval's is a list"),
        ("pickapic", {"caption": ""}, "caption is '', not a text"),
    ],
)
def test_a_row_of_another_shape_is_named(tmp_path, name, row, said):
    jsonl(tmp_path / "f.jsonl", row)
    with pytest.raises(InputError, match=f"f.jsonl:1: {said}"):
        prompts.load(f"{name}:{tmp_path / 'f.jsonl'}")


def test_a_template_asks_for_the_form_that_its_reward_pays(data):
    jsonl(data / "gsm8k/train.jsonl", EGGS)
    for name in templates.TEMPLATES:
        TextPrompts(template=name)
        text = templates.apply(name, "What is {question} \\boxed{x}?")
        assert text.count("What is {question} \\boxed{x}?") == 1
    (asked,) = prompts.load("gsm8k:train", template="d1")
    form, question = asked.text.partition("<reasoning>")[2].split("\n\n")
    assert question == EGGS["question"].strip()
    assert asked.columns["answer"] == "42"
    answered = "<reasoning>" + form.replace("the answer alone", "42")
    assert gsm8k([answered], [asked.text], ["42"]) == [4.0]
    form = templates.apply("d1_boxed", "x").partition("<reasoning>")[2].split("\n\n")[0]
    answered = "<reasoning>" + form.replace("the answer alone", "42")
    assert math_answer([answered], [""], ["42"]) == [3.0]
    with pytest.raises(ValueError, match="d1"):
        TextPrompts(template="d2")


DOGS = {"tag": "counting", "include": [{"class": "dog", "count": 2}], "prompt": "a photo of two dogs"}
DOGS["exclude"] = [{"class": "dog", "count": 3}]
BENCH = {"tag": "single_object", "include": [{"class": "bench", "count": 1}], "prompt": "a photo of a bench"}


def test_geneval_keeps_its_columns(data):
    jsonl(data / "geneval/prompts/evaluation_metadata.jsonl", DOGS, BENCH)
    jsonl(data / "geneval/train_metadata.jsonl", BENCH)
    asked, plain = prompts.load("geneval:evaluation")
    assert asked.text == "a photo of two dogs"
    assert asked.columns == {name: cell for name, cell in DOGS.items() if name != "prompt"}
    assert plain.columns["exclude"] is None
    assert [p.text for p in prompts.load("geneval:train")] == ["a photo of a bench"]


def test_pick_a_pic_gives_each_caption_once_and_reads_no_pictures(data):
    rows = [{"caption": text, "jpg_0": b"\xff", "label_0": 0.5} for text in ("a fox", "a cat ", "a fox")]
    parquet(data / "pickapic/data/train-00000-of-00002-abc.parquet", *rows)
    owl = {"caption": "an owl", "jpg_0": b"", "label_0": 1.0}
    parquet(data / "pickapic/data/train-00001-of-00002-abc.parquet", owl)
    assert prompts.load("pickapic:train") == [prompts.Prompt(text) for text in ("a fox", "a cat", "an owl")]


@pytest.mark.parametrize("names", ["Prompts,Category", "prompts,category"])
def test_drawbench_is_one_table_whatever_it_is_called(data, names):
    (data / "drawbench").mkdir(parents=True)
    table = f'{names}\r\nA red car.,Colors\r\n"A cup, and a dog.",Counting\r\n'
    (data / "drawbench/DrawBench prompts.csv").write_text(table)
    found = prompts.load("drawbench:test")
    assert [p.text for p in found] == ["A red car.", "A cup, and a dog."]
    assert columns(found) == [{"category": "Colors"}, {"category": "Counting"}]
    with pytest.raises(InputError, match="drawbench:train is neither a split of drawbench nor"):
        prompts.load("drawbench:train")
