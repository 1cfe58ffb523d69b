"""The published sets as their files have them: those that come with the package, and small copies of the others."""

import json
from collections import Counter

import pytest

from flowgrpo.data import prompts
from flowgrpo.errors import InputError


@pytest.fixture
def data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path / "data"


def put(file, text):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")


def points(found):
    """How often each category occurs among the questions; a question with several counts for each."""
    cells = [q["category"] for p in found for q in p.columns["questions"]]
    return Counter(name for cell in cells for name in ([cell] if isinstance(cell, str) else cell))


def test_the_sets_that_come_with_the_package_have_the_sizes_that_their_papers_give():
    geneval = prompts.load("geneval:evaluation")
    assert len(geneval) == 553
    assert Counter(p.columns["tag"] for p in geneval) == {
        "single_object": 80, "two_object": 99, "counting": 80, "colors": 94, "position": 100, "color_attr": 100,
    }  # fmt: skip
    compbench = prompts.load("t2i_compbench:val")
    assert set(Counter(p.columns["category"] for p in compbench).values()) == {300}
    assert len({p.columns["aspect"] for p in compbench}) == len(compbench) / 300 == 8
    unigenbench = prompts.load("unigenbench:en")
    assert len(unigenbench) == 600
    every = points(unigenbench)
    primary = {name for name in every if "-" not in name}
    assert primary == {
        "Style", "World Knowledge", "Attribute", "Action", "Relationship", "Compound", "Grammar", "Entity Layout",
        "Logical Reasoning", "Text Generation",
    }  # fmt: skip
    fine = {name: count for name, count in every.items() if not any(name + " -" in other for other in every)}
    assert (len(fine), sum(fine.values())) == (27, 1813)
    assert every["Attribute"] == sum(count for name, count in every.items() if name.startswith("Attribute -")) == 234
    vbench = prompts.load("vbench:full")
    dimensions = Counter(name for p in vbench for name in p.columns["dimension"])
    assert (len(vbench), len(dimensions)) == (946, 16)
    assert (dimensions["subject_consistency"], dimensions["scene"], dimensions["overall_consistency"]) == (72, 86, 93)


def test_a_copy_of_ones_own_comes_before_the_one_in_the_package(data):
    row = {"prompt": "a photo of an owl", "tag": "single_object", "include": []}
    put(data / "geneval" / "prompts" / "evaluation_metadata.jsonl", json.dumps(row))
    assert [p.text for p in prompts.load("geneval:evaluation")] == ["a photo of an owl"]


def test_geneval_2_asks_for_the_answer_that_its_list_names(data):
    pairs = [["How many pigs are in the image?", "Four"], ["Are the pigs green?", "Yes"]]
    row = {"prompt": "four green pigs", "atom_count": 3, "vqa_list": pairs, "skills": ["count", "attribute"]}
    put(data / "geneval2" / "geneval2_data.jsonl", json.dumps(row))
    (found,) = prompts.load("geneval2:test")
    assert (found.text, found.columns["atoms"]) == ("four green pigs", 3)
    assert found.columns["questions"] == [
        {"question": "How many pigs are in the image?", "answer": "four", "category": "count"},
        {"question": "Are the pigs green?", "answer": "yes", "category": "attribute"},
    ]


def test_chinese_test_points_lie_below_their_primary_dimension(data):
    described = {"考点": ["属性-数量", "风格"], "考点对应描述": ["两只熊猫", "水墨画"]}
    cell = json.dumps(described, ensure_ascii=False).replace('"', '""')
    table = f'index,prompt_zh,sub_dims_zh\n0,"熊猫","{cell}"\n'
    put(data / "unigenbench" / "data" / "test_prompts_zh.csv", table)
    (found,) = prompts.load("unigenbench:zh")
    assert found.columns["questions"] == [
        {"question": "两只熊猫", "category": ["属性", "属性-数量"]},
        {"question": "水墨画", "category": ["风格"]},
    ]


DPG = """item_id,text,keywords,proposition_id,dependency,category_broad,category_detailed,tuple,question_natural_language
cars,A red car.,,1,0,entity,whole,entity - whole (car),Is there a car?
cars,A red car.,,2,1,attribute,color,"attribute - color (car, red)",Is the car red?
cars,A red car.,,3,"1, 2",relation,spatial,"relation - spatial (car, road, on)",Is the red car on a road?
cars,A red car.,,4,3,other,count,other - count (road==1),Is it one road?
owl,An owl. ,,1,0,global,,global - (photo),Is it a photo?
"""


def test_dpg_bench_has_a_prompt_for_each_item_and_all_questions_above_one(data):
    """The official script zeroes descendants in order, so that the fourth question falls with the first."""
    put(data / "dpg_bench" / "dpg_bench" / "dpg_bench.csv", DPG)
    cars, owl = prompts.load("dpg_bench:test")
    assert [(q["category"], q["needs"]) for q in cars.columns["questions"]] == [
        ("entity", []), ("attribute", [0]), ("relation", [0, 1]), ("other", [0, 1, 2]),
    ]  # fmt: skip
    assert (owl.text, owl.columns["questions"][0]["category"]) == ("An owl.", "global")


def test_oneig_joins_a_table_with_the_questions_beside_it(data):
    table = "category,id,prompt_en,type,prompt_length,class\n"
    table += "Portrait,000,A smiling nun.,NP,short,\nText_Rendering,000,A sign.,NP,short,\n"
    put(data / "oneig" / "OneIG-Bench.csv", table)
    entry = {"question": '{"1": "Does she smile?", "2": "Is there a nun?"}', "dependency": '{"1": [2], "2": [0]}'}
    for name in ("anime", "human", "object"):
        put(data / "oneig" / "scripts" / "alignment" / "Q_D" / f"{name}.json", json.dumps({"000": entry}))
    (found,) = prompts.load("oneig:en")
    assert found.columns["category"] == "Portrait"
    assert found.columns["questions"] == [
        {"question": "Does she smile?", "needs": [1]},
        {"question": "Is there a nun?", "needs": []},
    ]
    put(data / "oneig" / "scripts" / "alignment" / "Q_D" / "human.json", '{"000": {"question": "{}"}}')
    with pytest.raises(InputError, match=r"human\.json: it does not hold questions and dependencies of OneIG-Bench"):
        prompts.load("oneig:en")
    (data / "oneig" / "scripts" / "alignment" / "Q_D" / "human.json").unlink()
    with pytest.raises(InputError, match=r"there is no file .*human\.json, which has the questions of OneIG-Bench"):
        prompts.load("oneig:en")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("dpg_bench:test", "looks in data/dpg_bench for dpg_bench.csv or a copy of github.com/TencentQQGYLab/ELLA"),
        ("geneval2:test", "looks in data/geneval2 for geneval2_data.jsonl or a copy of .*/GenEval2 .*its files"),
        ("unigenbench:fr", "is neither a split of unigenbench nor"),
    ],
)
def test_what_does_not_come_with_the_package_is_named_with_where_to_get_it(data, source, said):
    with pytest.raises(InputError, match=f"^--set: {source} {said}"):
        prompts.load(source, "--set")


@pytest.mark.parametrize(
    ("name", "row", "said"),
    [
        ("geneval2", {"prompt": "x", "vqa_list": [["a?", "yes"]], "skills": []}, "lists vqa_list and skills of one"),
        ("unigenbench", {"prompt_en": "x", "sub_dims_en": "{"}, "not valid JSON"),
        ("unigenbench", {"prompt_en": "x", "sub_dims_en": {"Testpoints": ["Style"]}}, "no object with the lists"),
        ("vbench", {"prompt_en": "x", "dimension": "color"}, "dimension is 'color', VBench's is a list"),
    ],
)
def test_a_row_of_another_shape_is_named(tmp_path, name, row, said):
    put(tmp_path / "f.jsonl", json.dumps(row))
    with pytest.raises(InputError, match=f"f.jsonl:1: .*{said}"):
        prompts.load(f"{name}:{tmp_path / 'f.jsonl'}")


def test_questions_in_a_wrong_order_and_a_missing_category_are_refused(data):
    put(data / "dpg_bench" / "dpg_bench.csv", DPG.replace("cars,A red car.,,1,0", "cars,A red car.,,1,2"))
    with pytest.raises(InputError, match=r"csv:2: proposition_id or dependency does not follow the lines before it"):
        prompts.load("dpg_bench:test")
    put(data / "t2i_compbench" / "color_train.txt", "a red car\n")
    with pytest.raises(InputError, match=r"holds no shape_train\.txt"):
        prompts.load("t2i_compbench:train")
