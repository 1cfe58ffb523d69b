"""Datasets of the hub as sources of prompts, by a package in the place of `datasets` that keeps to what is called of it."""

import sys
from types import SimpleNamespace

import pytest

from flowgrpo.data import prompts
from flowgrpo.errors import InputError


class Kind:
    """A kind of feature that is a picture, a sound or a video."""


class Split:
    """A split with a column of texts, one of pictures and one of bytes."""

    features = {"caption": "Value('string')", "image": Kind(), "jpg": "Value('binary')", "n": "Value('int64')"}

    def select_columns(self, names):
        return [{name: {"caption": f"a fox {n}", "n": n}[name] for name in names} for n in range(2)]


@pytest.fixture
def asked(monkeypatch):
    """What was asked of `datasets`; the next answer is raised if it is an error."""
    calls, answers = [], [Split()]

    def load_dataset(path, config, split):
        calls.append((path, config, split))
        if isinstance(answers[0], Exception):
            raise answers[0]
        return answers[0]

    package = SimpleNamespace(load_dataset=load_dataset, Image=Kind, Audio=Kind, Video=Kind)
    monkeypatch.setitem(sys.modules, "datasets", package)
    return SimpleNamespace(calls=calls, answers=answers)


def test_a_dataset_is_read_by_its_name_without_its_pictures(asked):
    found = prompts.load("hub:owner/name:train", column="caption")
    assert [(p.text, p.columns) for p in found] == [("a fox 0", {"n": 0}), ("a fox 1", {"n": 1})]
    prompts.load("hub:owner/name/main:test[:10]", column="caption")
    assert asked.calls == [("owner/name", None, "train"), ("owner/name", "main", "test[:10]")]
    with pytest.raises(InputError, match=r"hub:owner/name:train:1: the row has no key 'prompt', it has caption, n"):
        prompts.load("hub:owner/name:train")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            ConnectionError("Couldn't reach\nthe hub"),
            "could not be loaded from the model hub: HF_HUB_OFFLINE is set, and",
        ),
        (ValueError('Unknown split\n"tain"'), r"cannot be had from the hub \(Unknown split[^\n]*\)$"),
    ],
)
def test_what_cannot_be_had_is_one_sentence(asked, error, said):
    asked.answers[0] = error
    with pytest.raises(InputError, match=f"^prompts: hub:owner/name:tain {said}"):
        prompts.load("hub:owner/name:tain")


@pytest.mark.parametrize("source", ["hub:name:train", "hub:owner/name", "hub:owner/name/a/b:train", "hub:"])
def test_a_name_that_is_written_otherwise_is_refused(asked, source):
    with pytest.raises(InputError, match="is not written hub:owner/name:split or hub:owner/name/config:split"):
        prompts.load(source, "prompts.train")
    assert not asked.calls


def test_without_the_package_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match=r"prompts.train: hub:a/b:train needs the package datasets, .*flowgrpo\[hub\]"):
        prompts.load("hub:a/b:train", "prompts.train")
