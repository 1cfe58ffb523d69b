from collections import Counter

import pytest

from flowgrpo.data import corpora, prompts
from flowgrpo.data.evaluation.sets import QUESTIONS, SETS, find_set, own_set
from flowgrpo.errors import InputError
from rewards import BUILT_IN

SHIPPED = ("shapes:eval", "patterns:eval", "geneval", "unigenbench", "t2i_compbench", "vbench")


def test_every_row_names_prompts_and_rewards_that_exist():
    for name, row in SETS.items():
        assert row.name == name
        assert row.prompts in {*prompts.BUILT_IN, *corpora.NAMES}
        assert all(use["use"] in BUILT_IN for use in row.rewards)
        assert row.paper
        assert row.licence or name in prompts.BUILT_IN


@pytest.mark.parametrize("name", SHIPPED)
def test_every_prompt_of_a_set_that_comes_with_the_package_has_a_category(name):
    row = SETS[name]
    assert all(row.categories(prompt.text, prompt.columns) for prompt in prompts.load(row.prompts))


def test_captions_of_the_embedded_models_are_sorted_by_what_they_hold():
    """A quarter of the held-out captions name a kind that training never shows."""
    counts = Counter(name for p in prompts.load("shapes:eval") for name in SETS["shapes:eval"].categories(p.text, {}))
    assert counts.pop("unseen kind") == 64
    assert sum(counts.values()) == 256
    of_shapes = SETS["shapes:eval"].categories
    assert of_shapes("a green circle left of a red square", {}) == ["relation", "unseen kind"]
    assert of_shapes("two red squares and a blue square", {}) == ["two kinds"]
    assert of_shapes("three red squares", {}) == ["one kind"]
    of_patterns = SETS["patterns:eval"].categories
    assert of_patterns("a striped green circle", {}) == ["one object", "unseen kind"]
    assert of_patterns("a striped red circle and a checked blue square", {}) == ["two objects"]
    assert of_patterns("a striped red circle above a checked blue square", {}) == ["relation"]


def test_another_split_or_file_has_the_rules_of_its_set():
    chinese = find_set("unigenbench:zh")
    assert (chinese.name, chinese.prompts, chinese.by, chinese.samples) == (
        "unigenbench:zh",
        "unigenbench:zh",
        QUESTIONS,
        4,
    )
    assert find_set("geneval:mine.jsonl").prompts == "geneval:mine.jsonl"
    assert [find_set(name) for name in ("shapes:train", "mine.jsonl", "gsm8k:test")] == [None] * 3


def test_a_set_of_ones_own_has_the_column_that_is_named():
    own = own_set("mine.jsonl", "kind", [{"use": "jpeg_size"}])
    assert own.categories("a cat", {"kind": "cats"}) == ["cats"]
    assert own.categories("a cat", {"kind": ["cats", "pets", "cats"]}) == ["cats", "pets"]
    assert own.categories("a cat", {"kind": None}) == []
    with pytest.raises(InputError, match="--by: the prompts of mine.jsonl have no column 'kind', they have tag"):
        own.categories("a cat", {"tag": "x"})
    with pytest.raises(InputError, match="--set: genevl is no evaluation set, did you mean 'geneval'?"):
        own_set("genevl", None, [])
