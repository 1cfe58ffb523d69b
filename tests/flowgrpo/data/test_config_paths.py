"""Paths of a config file are looked for beside it first; those of the command line are not."""

import shutil
from pathlib import Path

import pytest
import yaml

from flowgrpo import config
from flowgrpo.data import configs
from flowgrpo.errors import InputError


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with a config and what it names, seen from a folder beside it that is empty."""
    (tmp_path / "here").mkdir()
    (tmp_path / "project" / "models" / "own").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    for name in ("train.txt", "gsm8k.jsonl", "mine.py", "tree.py"):
        (tmp_path / "project" / name).write_text("")
    return tmp_path / "project"


WRITTEN = {
    "model": {"path": "models/own"},
    "prompts": {"train": "train.txt", "eval": "gsm8k:gsm8k.jsonl", "folder": "models"},
    "rewards": [{"use": "./mine.py:redness"}, "mine.py", "jpeg_size"],
    "eval_rewards": "mine.py:hue",
    "algorithm": {"tree": {"name": "custom", "function": "./tree.py:grow"}},
}


def written(project, changed):
    (project / "run.yaml").write_text(yaml.safe_dump(changed))
    return project / "run.yaml"


def found(settings):
    """The paths of a configuration, in the order of `WRITTEN`."""
    uses = [use.use for use in (*settings.rewards, *settings.eval_rewards)]
    prompts = settings.prompts
    return [settings.model.path, prompts.train, prompts.eval, prompts.folder, *uses, settings.algorithm.tree.function]


def test_every_path_of_a_file_is_looked_for_beside_it(project):
    prompts = "{0}/train.txt gsm8k:{0}/gsm8k.jsonl {0}/models"
    code = "{0}/mine.py:redness {0}/mine.py jpeg_size {0}/mine.py:hue {0}/tree.py:grow"
    paths = f"{{0}}/models/own {prompts} {code}".format(project)
    assert found(config.load(written(project, WRITTEN))) == paths.split()


@pytest.mark.parametrize("path", ["own.safetensors", {"transformer": "own.safetensors", "transformer_2": "owner/name"}])
def test_a_lora_of_each_network_is_looked_for_beside_it_as_one_of_all_is(project, path):
    (project / "own.safetensors").touch()
    found = config.load(written(project, {"model": {"path": "shapes", "lora": {"path": path}}})).model.lora.path
    beside = f"{project}/own.safetensors"
    assert found == (beside if isinstance(path, str) else {**path, "transformer": beside})


@pytest.mark.parametrize("own", ["data", "elsewhere"])
def test_a_corpus_is_looked_for_in_the_default_folder_beside_it(project, own):
    """`data` without the corpus is left alone, for the corpus may be in that of the current folder."""
    (project / own / "gsm8k").mkdir(parents=True)
    (project / "data").mkdir(exist_ok=True)
    for asked, folder in (("gsm8k:test", f"{project}/data" if own == "data" else "data"), ("shapes:test", "data")):
        changed = {"model": {"path": "shapes"}, "prompts": {"train": "shapes:train", "eval": asked}}
        assert config.load(written(project, changed)).prompts.folder == folder


def test_paths_stay_short_where_the_config_lies_below_or_here(project, monkeypatch):
    monkeypatch.chdir(project.parent)
    assert config.load(written(project, WRITTEN).relative_to(project.parent)).prompts.train == "project/train.txt"
    monkeypatch.chdir(project)
    assert config.load("run.yaml").rewards[0].use == "./mine.py:redness"


def test_beside_the_config_comes_before_the_current_folder_which_still_serves(project):
    for name in ("train.txt", "more.txt"):
        Path(name).write_text("")
    settings = config.load(written(project, {**WRITTEN, "prompts": {"train": "train.txt", "eval": "more.txt"}}))
    assert (settings.prompts.train, settings.prompts.eval) == (f"{project}/train.txt", "more.txt")


def test_names_and_addresses_are_no_paths(project):
    (project / "shapes").mkdir()
    (project / "shapes:train").touch()
    names = {
        "model": {"path": "shapes"},
        "prompts": {"train": "shapes:train", "eval": "hub:owner/name:split"},
        "rewards": ["http://127.0.0.1:8100/mine.py", "pkg.module:object"],
    }
    settings = config.load(written(project, names))
    assert settings.model.path == "shapes"
    assert (settings.prompts.train, settings.prompts.eval) == ("shapes:train", "hub:owner/name:split")
    assert [use.use for use in settings.rewards] == names["rewards"]
    assert config.load(written(project, {"model": {"path": "owner/model"}})).model.path == "owner/model"


@pytest.mark.parametrize(
    ("changed", "place", "path"),
    [
        ({"prompts": {"train": "no.txt"}}, "prompts.train", "no.txt"),
        ({"prompts": {"eval": "math:no.parquet"}}, "prompts.eval", "no.parquet"),
        ({"model": {"path": "./no"}}, "model.path", "./no"),
        ({"rewards": [{"use": "jpeg_size"}, {"use": "./no.py:f"}]}, "rewards.1.use", "./no.py"),
        ({"eval_rewards": ["no.py"]}, "eval_rewards.0", "no.py"),
    ],
)
def test_what_is_nowhere_is_refused_with_both_places(project, changed, place, path):
    file = written(project, {**WRITTEN, **changed})
    said = f"{place}: there is no {path}, neither beside the config ({project / path}) nor in the current folder"
    with pytest.raises(InputError) as error:
        config.load(file)
    assert str(error.value) == said
    (section,) = changed
    assert config.load(file, {section: WRITTEN[section]})  # replaced by the command line: nobody will look for it


def test_overrides_are_relative_to_the_current_folder(project):
    settings = config.load(written(project, WRITTEN), ["prompts.train=train.txt", "rewards=[./mine.py:redness]"])
    assert (settings.prompts.train, settings.rewards[0].use) == ("train.txt", "./mine.py:redness")


def test_a_built_in_config_looks_in_the_current_folder_only(project, monkeypatch):
    shutil.copy(written(project, WRITTEN), project / "built-in.yaml")
    monkeypatch.setattr(configs, "FOLDER", project)
    for name in ("built-in", project / "built-in.yaml"):
        assert config.load(name).prompts.train == "train.txt"


def test_names_that_no_file_can_have_stay_as_they_are(project):
    for name in ("a" * 300, "a\0b"):
        assert config.load(written(project, {"model": {"path": name}})).model.path == name
