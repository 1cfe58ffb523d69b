"""`flowgrpo init`, and built-in configs by name."""

from pathlib import Path

import pytest

from flowgrpo import config
from flowgrpo.data import configs


@pytest.fixture(autouse=True)
def empty(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_configs_are_listed_with_what_they_need(printed):
    said = printed("init")
    assert "sd35-medium\n  Stable Diffusion 3.5 medium learns" in said
    assert "  GPU:     one of 24 GB: at least " in said
    assert "Checked:" not in said  # but once below the list
    rows = printed("init", "--format", "json")
    assert [row["name"] for row in rows] == configs.names()
    assert all("Not run on the real weights" in row["Checked"] for row in rows)


def test_a_config_is_written_once_and_named(printed, refused):
    assert printed("init", "flux1-dev", "--out", "a.yaml") == "a.yaml\n"
    assert Path("a.yaml").read_text() == (configs.FOLDER / "flux1-dev.yaml").read_text()
    for name, words in (("a.yaml", ["--out", "a.yaml"]), ("flux1-dev.yaml", [])):
        Path(name).write_text("mine")
        way = (
            "--out a.yaml: is there already, choose another" if words else f"{name}: is there already, write to another"
        )
        assert refused("init", "flux1-dev", *words).startswith(way)
        assert Path(name).read_text() == "mine"
    Path("flux1-dev.yaml").unlink()
    printed("init", "flux1-dev")
    assert Path("flux1-dev.yaml").is_file()
    told = printed("init", "sd35", "--out", "b.yaml", "--format", "json")
    assert told == {"name": "sd35-medium", "file": "b.yaml"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["init", "flux"], "there is no built-in config 'flux', did you mean 'flux1-24gb'?"),  # listed, not a short one
        (["init", "flux1-dve"], "there is no built-in config 'flux1-dve', did you mean 'flux1-dev'?"),
        (["init", "--out", "a.yaml"], "--out: say which config to write"),
        (["plan", "flux1-dve"], "flux1-dve: no such config file and no built-in config of that name, did you mean"),
        (["init", "flux1-dev", "--out", "/proc/none/a.yaml"], "--out"),
        (
            ["train", "shapes"],
            "shapes: no such config file; shapes is a model, which a config names: model: {path: shapes}",
        ),
        (["train", "d"], "d: no such config file and no built-in config"),  # a word, or more, and not a letter
        (["init", "sd35-"], "'sd35-' is short for several built-in configs: sd35-large, sd35-medium"),
        (["train", "sd35-"], "'sd35-' is short for several built-in configs: sd35-large, sd35-medium"),
        (["doctor", "flux1-"], "'flux1-' is short for several built-in configs: flux1-24gb, flux1-dev"),
        (["init", ""], "there is no built-in config '', choose one of dream-7b,"),
    ],
)
def test_what_is_not_there_is_refused_in_one_sentence(arguments, said, refused):
    assert said in refused(*arguments)
    assert list(Path().iterdir()) == []


def test_a_file_of_the_same_name_goes_before_a_built_in_config(printed):
    Path("flux1-dev").write_text("model: {path: shapes}\nrun: {name: mine}\n")
    assert "name: mine" in printed("plan", "flux1-dev", "--full")


def test_a_short_name_is_taken_where_it_means_one_config(printed):
    printed("init", "sd35")  # a family's
    printed("init", "dream")  # no other begins so
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
def test_a_config_of_that_name_that_lies_here_is_named(file, refused):
    Path(file).parent.mkdir(exist_ok=True)
    Path(file).write_text("model: {path: shapes}\n")
    assert refused("train", "mine") == f"mine: no such config file, did you mean '{file}'?"
