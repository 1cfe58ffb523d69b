"""What a key means: under its field, on the command line, and on the pages, which are held against the code."""

import re
from pathlib import Path

import pytest

from flowgrpo import config
from flowgrpo.commands.runs.explain import explain_key, find_uses, page
from flowgrpo.data import yaml_maps
from flowgrpo.errors import InputError
from flowgrpo.flow.config import Config
from flowgrpo.flow.methods import CHOICES
from flowgrpo.mdlm.config import TextConfig
from flowgrpo.mdlm.decoding.decoders import AXES, MODIFIERS
from flowgrpo.mdlm.methods import CHOICES as TEXT_CHOICES
from flowgrpo.schema.base import Strict
from flowgrpo.schema.explain import explain, section, sentences

ROOT = Path(__file__).parents[4]
DOCS = ROOT / "docs"
WORDS = {**AXES, "modifiers": MODIFIERS}  # of a decoder
SHAPES, DIGITS = {"model": {"path": "shapes"}}, {"kind": "mdlm", "model": {"path": "digits"}}


def sections(model):
    """A section and all sections below it, but for words of axes."""
    yield model
    for field in model.model_fields.values():
        inner = section(field.annotation)
        if inner is not None and "name" not in inner.model_fields:
            yield from sections(inner)


MODELS = dict.fromkeys([*sections(Config), *sections(TextConfig)])


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_every_key_has_a_sentence(model):
    if model is not Strict:
        assert set(sentences(model)) >= set(model.model_fields)


@pytest.mark.parametrize("choices", [CHOICES, TEXT_CHOICES, WORDS])
def test_every_option_has_a_sentence(choices):
    for words in choices.values():
        for choice in words.values():
            for model in sections(choice):
                assert set(sentences(model)) >= set(model.model_fields) - {"name"}, model


def test_the_page_of_keys_is_that_of_the_code():
    block = re.search(r"```yaml\n(kind: flow.*?)```", (DOCS / "reference/config.md").read_text(), re.DOTALL)[1]
    assert block == page(config.validate(SHAPES)), (
        "docs/reference/config.md: put flowgrpo.commands.runs.explain.page there"
    )
    written = yaml_maps.parse_yaml(block, "docs/reference/config.md")
    assert config.validate(written) == config.validate({**SHAPES, "rewards": ["shapes"]})


def options(choices):
    """The options of some choices, those of their sections too."""
    return {key for choice in choices.values() for model in sections(choice) for key in model.model_fields} - {"name"}


def test_the_table_of_the_parts_of_a_decoder_has_every_word_and_option():
    page = (DOCS / "reference/texts.md").read_text()
    rows = "".join(line for line in page.partition("## Options")[2].splitlines(keepends=True) if line.startswith("|"))
    for part, choices in WORDS.items():
        for word in {*choices, *options(choices)}:
            assert re.search(rf"\b{word}\b", rows), f"{part}: {word}"


def test_a_key_is_explained():
    found = explain(config.validate(SHAPES), "train.rollout_batch")
    assert (found.takes, found.default, found.value) == ("an integer or auto or null", None, None)
    assert found.meaning.endswith("null: micro_batch; auto: found.")
    two = config.validate({**SHAPES, "rewards": ["shapes", {"use": "jpeg_size", "weight": 2.0}]})
    found = explain(two, "rewards.weight")
    assert (found.default, found.value) == (1.0, [1.0, 2.0])
    chosen = config.validate({**SHAPES, "algorithm": {"preset": "tempflow"}, "train": {"group_size": 24}})
    assert explain(chosen, "algorithm.tree.branches").value == 6
    chosen = config.validate({**DIGITS, "algorithm": {"likelihood": "monte_carlo"}})
    found = explain(chosen, "algorithm.likelihood.draws")
    assert (found.meaning, found.takes, found.value) == ("Random masks of an answer.", "an integer, at least 1", 2)
    assert explain(chosen, "algorithm.decoder.cfg_scale").takes == "a number"


def test_below_a_section_stand_the_keys_that_can_be_set():
    found = explain(config.validate(SHAPES), "algorithm.objective")
    assert "kl" in found.below
    assert set(found.below) == set(type(found.value).model_fields) - {"name"}


@pytest.mark.parametrize(
    ("key", "sentence"),
    [
        ("train.micro_bach", "--explain train.micro_bach: there is no such key, did you mean 'train.micro_batch'?"),
        ("groups", "--explain groups: there is no such key, did you mean 'train.groups'?"),
        ("model.call.height", "--explain model.call.height: model.call has no keys of its own"),
        ("algorithm.tree.branches", "--explain algorithm.tree.branches: there is no such key, did you mean "),
    ],
)
def test_no_such_key(key, sentence):
    with pytest.raises(InputError, match="^" + re.escape(sentence)):
        explain(config.validate(SHAPES), key)


def test_a_key_is_used_in_the_files_of_its_own_kind():
    for settings, other in ((SHAPES, "flowgrpo/mdlm/"), (DIGITS, "flowgrpo/flow/")):
        told = explain_key(config.validate(settings), "model.dtype")
        places = [place for label, place in told if label == "used in"]
        assert places
        assert not [place for place in places if place.startswith(other)]


def test_where_a_key_is_used():
    places = find_uses("train.group_size")
    for place in places:
        file, numbers = place.split(":")
        lines = (ROOT / file).read_text().splitlines()
        assert all("train.group_size" in lines[int(number) - 1] for number in numbers.split(", "))
    files = [place.partition(":")[0] for place in places]
    assert "flowgrpo/training/prompts/prompt_groups.py" in files
    assert "flowgrpo/flow/methods/presets.py" not in files  # a word in a text is no use of it


def test_plan_explains(printed, refused):
    plan = ["plan", ROOT / "configs/mdlm.yaml", "--explain"]
    told = printed(*plan, "train.passes")
    assert all(words in told for words in ("train.passes ", "masks of its own", "default", "used in"))
    assert "used in" not in printed(*plan, "train")
    said = "--explain train.pases: there is no such key, did you mean 'train.passes'?"
    assert refused(*plan, "train.pases") == said
