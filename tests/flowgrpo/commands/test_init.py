"""`flowgrpo init`, and built-in configs by name."""

import json
from pathlib import Path

import pytest

from flowgrpo import config
from flowgrpo.cli import main
from flowgrpo.data import configs


@pytest.fixture(autouse=True)
def empty(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_configs_are_listed_with_what_they_need(capsys):
    assert main(["init"]) == 0
    said = capsys.readouterr().out
    assert "sd35-medium\n  Stable Diffusion 3.5 medium learns" in said
    assert "  GPU:     one of 24 GB: at least " in said
    assert main(["init", "--format", "json"]) == 0
    assert [row["name"] for row in json.loads(capsys.readouterr().out)] == configs.names()


def test_a_config_is_written_once(capsys):
    assert main(["init", "flux1-dev", "--out", "a.yaml"]) == 0
    assert capsys.readouterr().out == "a.yaml\n"
    assert Path("a.yaml").read_text() == (configs.FOLDER / "flux1-dev.yaml").read_text()
    Path("a.yaml").write_text("mine")
    assert main(["init", "flux1-dev", "--out", "a.yaml"]) == 2
    assert "--out a.yaml: is there already" in capsys.readouterr().err
    assert Path("a.yaml").read_text() == "mine"
    assert main(["init", "flux1-dev"]) == 0
    assert Path("flux1-dev.yaml").is_file()


def test_a_file_that_is_there_is_named_without_an_option_that_was_not_given(capsys):
    Path("flux1-dev.yaml").write_text("mine")
    assert main(["init", "flux1-dev"]) == 2
    said = "flowgrpo: flux1-dev.yaml: is there already, write to another with --out FILE\n"
    assert capsys.readouterr().err == said
    assert Path("flux1-dev.yaml").read_text() == "mine"


def test_the_file_that_was_written_is_named_in_json(capsys):
    assert main(["init", "sd35", "--out", "a.yaml", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"name": "sd35-medium", "file": "a.yaml"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["init", "flux1-dve"], "there is no built-in config 'flux1-dve', did you mean 'flux1-dev'?"),
        (["init", "--out", "a.yaml"], "--out: say which config to write"),
        (["plan", "flux1-dve"], "flux1-dve: no such config file and no built-in config of that name, did you mean"),
        (["init", "flux1-dev", "--out", "/proc/none/a.yaml"], "--out"),
        (["train", "d"], "d: no such config file and no built-in config"),  # a word, or more, and not a letter
        (["init", "sd35-"], "'sd35-' is short for several built-in configs: sd35-large, sd35-medium"),
        (["train", "sd35-"], "'sd35-' is short for several built-in configs: sd35-large, sd35-medium"),
        (["doctor", "flux1-"], "'flux1-' is short for several built-in configs: flux1-24gb, flux1-dev"),
        (["init", ""], "there is no built-in config '', choose one of dream-7b,"),
    ],
)
def test_what_is_not_there_is_refused_in_one_sentence(arguments, said, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert said in error.replace("\n", " ")
    assert list(Path().iterdir()) == []


def test_a_file_of_the_same_name_goes_before_a_built_in_config(capsys):
    Path("flux1-dev").write_text("model: {path: shapes}\nrun: {name: mine}\n")
    assert main(["plan", "flux1-dev", "--full"]) == 0
    assert "name: mine" in capsys.readouterr().out


def test_a_short_name_is_taken_where_it_means_one_config(capsys):
    assert main(["init", "sd35"]) == 0  # a family's
    assert main(["init", "dream"]) == 0  # no other begins so
    assert {file.name for file in Path().iterdir()} == {"sd35-medium.yaml", "dream-7b.yaml"}
    assert config.load("sd35").run.name == "sd35-medium"
    assert config.load("dream").run.name == "dream-7b"
    assert configs.whole("qwen-image") == "qwen-image"  # itself, though others begin so
    Path("dream-7b").mkdir()  # a model, or samples
    assert config.load("dream-7b").run.name == "dream-7b"
    Path("dream").touch()
    assert configs.place_of("dream") == Path("dream")  # a file that is there goes before


@pytest.mark.parametrize(("short", "meant"), configs.SHORT.items())
def test_the_short_name_of_a_family_would_be_several_configs(short, meant):
    begun = [name for name in configs.names() if name.startswith(short)]
    assert meant in begun
    assert short not in begun
    assert len(begun) > 1


@pytest.mark.parametrize("file", ["mine.yaml", "configs/mine.yaml"])
def test_a_config_of_that_name_that_lies_here_is_named(file, capsys):
    Path(file).parent.mkdir(exist_ok=True)
    Path(file).write_text("model: {path: shapes}\n")
    assert main(["train", "mine"]) == 2
    assert f"mine: no such config file, did you mean '{file}'?" in capsys.readouterr().err.replace("\n", " ")
