"""What is installed: extras that are named exist, tested versions are allowed ones, and the wheel holds every data file."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]
NAMED = re.compile(r"(?:flowgrpo|pip install (?:-e )?'?\.)\\?\[([\w,-]+)\\?\]")  # in a test's pattern with backslashes
PACKAGES = ("flowgrpo", "rewards", "samplers")
WORDS = (".md", ".py", ".yaml", ".toml")
TEXTS = [
    ROOT / "Dockerfile",
    ROOT / "Makefile",
    *(
        file
        for top in (*PACKAGES, "configs", "docs", "research", "scripts", "tests")
        for file in sorted((ROOT / top).rglob("*"))
        if file.suffix in WORDS
    ),
    *sorted(ROOT.glob("*.md")),
    ROOT / "pyproject.toml",
]


def extras_of(text):
    return {extra for names in NAMED.findall(text) for extra in names.split(",")}


def test_every_extra_that_is_named_exists():
    named = {str(file.relative_to(ROOT)): extras_of(file.read_text(encoding="utf-8")) for file in TEXTS}
    assert set().union(*named.values()) >= {"ocr", "serve", "video", "wandb", "xformers"}
    assert {(file, extra) for file, names in named.items() for extra in names - EXTRAS.keys()} == set()


def required(extra):
    """The requirements of an extra, with those of the extras that it takes in."""
    for line in EXTRAS[extra]:
        requirement = Requirement(line)
        if requirement.name == PROJECT["project"]["name"]:
            for other in requirement.extras:
                yield from required(other)
        else:
            yield requirement


def test_the_tested_versions_are_allowed_and_complete():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = [Requirement(line) for line in lines if not line.startswith("#")]
    assert all(re.fullmatch(r"==[\w.]+", str(each.specifier)) and each.url is None for each in pinned)
    tested = {canonicalize_name(each.name): str(each.specifier).removeprefix("==") for each in pinned}
    for requirement in [*map(Requirement, PROJECT["project"]["dependencies"]), *required("test")]:
        name = canonicalize_name(requirement.name)
        assert requirement.specifier.contains(tested[name]), f"{requirement}: tested with {tested[name]}"
        assert any(each.operator in (">=", "==") for each in requirement.specifier), f"{requirement}: no lowest version"


@pytest.mark.parametrize("package", PACKAGES)
def test_the_wheel_holds_every_file_of_a_package(package):
    folder, data = ROOT / package, PROJECT["tool"]["setuptools"]["package-data"]
    held = {file for pattern in [*data["*"], *data.get(package, [])] for file in folder.glob(pattern) if file.is_file()}
    there = {file for file in folder.rglob("*") if file.is_file() and "__pycache__" not in file.parts}
    assert folder / "py.typed" in held
    assert {str(file.relative_to(ROOT)) for file in there - held if file.suffix != ".py"} == set()


def test_the_image_is_made_of_what_is_sent_to_its_builder():
    copied = re.findall(r"^COPY (.+) \S+$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    sources = {source for line in copied for source in line.split()}
    sent = set(re.findall(r"^!(.+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE))
    assert sources == sent
    assert {*PACKAGES, "pyproject.toml", PROJECT["project"]["readme"]} <= sources
    assert all((ROOT / source).exists() for source in sources)


def test_the_version_is_the_same_wherever_it_stands():
    version = PROJECT["project"]["version"]
    assert re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)[1] == version
    assert re.findall(r"^## \[(\d[\d.]*)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0] == version
