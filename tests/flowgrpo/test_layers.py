"""Imports point down only: flowgrpo -> rewards, samplers; these know nothing above or beside them."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ALLOWED = {"flowgrpo": {"flowgrpo", "rewards", "samplers"}, "rewards": {"rewards"}, "samplers": {"samplers"}}


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module.partition(".")[0]


@pytest.mark.parametrize("package", ALLOWED)
def test_imports_point_down(package):
    files = list((ROOT / package).rglob("*.py"))
    assert files
    for path in files:
        own = set(imported(path)) & set(ALLOWED)
        assert own <= ALLOWED[package], f"{path} imports {own - ALLOWED[package]}"


def test_samplers_need_torch_and_diffusers_only():
    libraries = {name for path in (ROOT / "samplers").rglob("*.py") for name in imported(path)}
    assert not libraries & {"peft", "accelerate", "transformers", "pydantic", "typer", "rich", "PIL"}
