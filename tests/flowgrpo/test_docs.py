"""Every page names only what exists: links, files and folders of the repository, names of the code, commands."""

import importlib
import json
import re
import shlex
from pathlib import Path

import pytest

from flowgrpo import cli, config
from flowgrpo.schema.validation import has_key

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md"))]
PACKAGES = "flowgrpo|samplers|rewards"
LINK = re.compile(r"\]\(([^)\s]+)\)")
FILE = re.compile(r"(?<![\w./-])((?:flowgrpo|samplers|rewards|scripts|tests|configs|docs)/[\w./*-]*[\w/*])")
NAME = re.compile(rf"(?<![\w./-])((?:{PACKAGES})(?:\.[A-Za-z_]\w*)+)(?![\w(/])(?<!\.md)")
COMMAND = re.compile(r"(?:^ +|`|\$ )flowgrpo ([a-z]+)(?: ([a-z]+))?", re.MULTILINE)
ENTRY_POINTS = {"flowgrpo.rewards"}  # the name of a group, not of a module


def heading(line):
    """The anchor that a page's viewer makes of a heading."""
    return re.sub(r"[^\w\s-]", "", line.lstrip("# ").strip().lower()).replace(" ", "-")


def links(page):
    return [target for target in LINK.findall(page.read_text()) if "://" not in target]


def resolved(name):
    """What a dotted name stands for: the longest module it begins with, then attributes."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            value = getattr(value, part)
        return value
    raise AttributeError(name)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in links(page):
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), f"{page.name} links to {target}"
        if anchor:
            anchors = {heading(line) for line in file.read_text().splitlines() if line.startswith("#")}
            assert anchor in anchors, f"{page.name} links to {target}"


@pytest.mark.parametrize("page", [page for page in PAGES if "docs" in page.parts], ids=lambda page: page.name)
def test_a_link_to_a_page_says_its_subject(page):
    assert re.findall(r"\[[a-z_/]+\.md\]\(", page.read_text()) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page):
    missing = [name for name in FILE.findall(page.read_text()) if not list(ROOT.glob(name))]
    assert not missing, f"{page.name} names {missing}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_of_the_code_exist(page):
    for name in sorted(set(NAME.findall(page.read_text())) - ENTRY_POINTS):
        try:
            resolved(name)
        except AttributeError as error:
            raise AssertionError(f"{page.name} names {name}: {error}") from error


def words(app):
    """The commands of a typer application, and below its groups theirs, as they are typed."""
    alone = {(command.name or command.callback.__name__,) for command in app.registered_commands}
    return alone | {(group.name, *rest) for group in app.registered_groups for rest in words(group.typer_instance)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_exist(page):
    known = words(cli.app)
    for first, second in COMMAND.findall(page.read_text()):
        assert (first,) in known or (first, second) in known, f"{page.name} names flowgrpo {first} {second}"


def test_the_pages_of_users_are_short():
    """Research pages are apart, the texts of the code's own docstrings too."""
    folders = ("start", "guides", "concepts", "reference")
    pages = [page for folder in folders for page in ROOT.glob(f"docs/{folder}/**/*.md")]
    words = {page: len(page.read_text().split()) for page in [ROOT / "README.md", *pages]}
    assert words[ROOT / "README.md"] <= 900
    assert sum(words.values()) <= 35_000


# Options of an axis belong to its word, those of model.call to the pipeline.
KEY = re.compile(r"`((?:model|prompts|train|eval|run)\.(?!call\.|jsonl|txt|parquet)[a-z_]+(?:\.[a-z_]+)*)")


@pytest.mark.parametrize("page", [page for page in PAGES if KEY.search(page.read_text())], ids=lambda page: page.name)
def test_keys_that_are_named_are_in_a_configuration(page):
    kinds = [kind() for kind in config.CONFIGS.values()]
    for key in sorted(set(KEY.findall(page.read_text()))):
        assert key in config.RENAMED or any(has_key(kind, key) for kind in kinds), f"{page.name} names {key}"


def test_the_questions_count_the_pipelines_that_were_tried():
    tried = json.loads((ROOT / "flowgrpo/data/models.json").read_text())
    certified = sum(row["certified"] for row in tried)
    classes = f"{len({row['class'] for row in tried})} classes and their variants"
    said = (
        f"of {len(tried)} pipelines of diffusers that were tried ({classes}), {certified} pass the checks as they are,"
    )
    assert f"{said} and {len(tried) - certified} are refused" in " ".join(
        (ROOT / "docs/start/questions.md").read_text().split()
    )


def options(page):
    """The lines of options that stand in a page, each with what it goes behind."""
    text = page.read_text()
    behind = re.search(r"Each line goes behind\s+`flowgrpo plan configs/shapes\.yaml ([^`]*)`", text)
    if behind is None:
        return []
    section = text[behind.end() :].partition("\n## ")[0].splitlines()
    lines = [shlex.split(line, comments=True) for line in section if line.startswith("    ") and "flowgrpo" not in line]
    return [[*shlex.split(behind[1]), *line] for line in lines if line and "=" in line[0]]


@pytest.mark.parametrize("page", [page for page in PAGES if options(page)], ids=lambda page: page.name)
def test_options_of_a_method_are_taken(page):
    for line in options(page):
        config.load(ROOT / "configs" / "shapes.yaml", line)


def test_most_pages_of_methods_have_options():
    assert sum(len(options(page)) for page in PAGES) > 60
