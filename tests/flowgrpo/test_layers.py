"""Imports point down only, by a table of packages; flow models and texts never meet, and no two files import each other.

The tests of the packages lie as the packages do.
"""

import ast
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Each package with those it may import. What stands above a package is never imported by it.
BELOW = {
    "samplers": set(),
    "rewards": set(),
    "rewards.jail": set(),
    "flowgrpo.errors": set(),
    "flowgrpo.shapes": set(),
    "flowgrpo.schema": {"flowgrpo.errors", "rewards"},
    "flowgrpo.data": {"flowgrpo.errors", "flowgrpo.shapes", "flowgrpo.schema", "rewards", "samplers"},
    "flowgrpo.conditions": {"flowgrpo.data"},
}
_BASE = {"flowgrpo.errors", "flowgrpo.schema", "rewards", "samplers"}
BELOW["flowgrpo.training"] = {*_BASE, "flowgrpo.data"}
_WING = {*_BASE, "flowgrpo.data", "flowgrpo.training"}
BELOW |= {
    "flowgrpo.flow.methods": {*_BASE, "flowgrpo.training"},
    "flowgrpo.flow.pipeline": _WING,
    "flowgrpo.flow": {*_WING, "flowgrpo.flow.methods", "flowgrpo.flow.pipeline"},
    "flowgrpo.mdlm.decoding": _BASE,
    "flowgrpo.mdlm.methods": {*_BASE, "flowgrpo.training", "flowgrpo.mdlm.decoding"},
    "flowgrpo.mdlm": {*_WING, "flowgrpo.mdlm.decoding", "flowgrpo.mdlm.methods"},
}
BELOW["flowgrpo.config"] = {*_WING, "flowgrpo.flow", "flowgrpo.mdlm"}
_BOTH = {name for name in BELOW if name.startswith("flowgrpo.") and name != "flowgrpo.conditions"} | _BASE
BELOW["flowgrpo.commands.gallery"] = {*_WING, "flowgrpo.config"}
BELOW["flowgrpo.commands"] = {*_BOTH, "flowgrpo.commands.gallery"}
BELOW["flowgrpo.cli"] = BELOW["flowgrpo"] = {*BELOW["flowgrpo.commands"], "flowgrpo.commands"}
BELOW["flowgrpo.__main__"] = {"flowgrpo.cli"}

# Test files below tests/flowgrpo that test no one module, and what they test.
WIDER = {
    "test_layers.py": "what imports what",
    "test_door.py": "what the command and the package import, and what they give",
    "mdlm/test_llada_gsm8k.py": "configs/llada_gsm8k.yaml",
}

TOP = ("flowgrpo", "rewards", "samplers")
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for top in TOP
    for path in sorted((ROOT / top).rglob("*.py"))
}


def imported(path):
    """Full names of what a file imports, at its top or inside a function."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "lazy":
            yield ast.literal_eval(node.args[0])


def module_of(name):
    """Our module that an imported name is of, or None."""
    while name and name not in MODULES:
        name = name.rpartition(".")[0]
    return name or None


def package_of(module):
    """The package in the table that a module is of: the one its name begins with."""
    return module if module in BELOW else package_of(module.rpartition(".")[0])


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_down(module):
    own = package_of(module)
    met = {package_of(other) for other in map(module_of, imported(MODULES[module])) if other} - {own}
    assert met <= BELOW[own], f"{module} imports {met - BELOW[own]}, which does not stand below {own}"


def test_the_table_itself_points_down():
    left = dict(BELOW)
    while left:
        bottom = {name for name, below in left.items() if not below & left.keys()}
        assert bottom, f"these stand on each other: {sorted(left)}"
        left = {name: below for name, below in left.items() if name not in bottom}


def test_flow_models_and_texts_never_meet():
    for name, below in BELOW.items():
        if name.startswith(("flowgrpo.flow", "flowgrpo.mdlm")):
            other = "flowgrpo.mdlm" if name.startswith("flowgrpo.flow") else "flowgrpo.flow"
            assert not [package for package in below if package.startswith(other)]


def test_no_files_import_each_other():
    left = defaultdict(set)
    for module, path in MODULES.items():
        left[module] |= {other for other in map(module_of, imported(path)) if other and other != module}
    while left:
        bottom = {name for name, below in left.items() if not below & left.keys()}
        assert bottom, f"in or above a circle: {sorted(left)}"
        left = {name: below for name, below in left.items() if name not in bottom}


def test_only_the_door_stands_in_the_entrance():
    door = {"__init__.py", "__main__.py", "cli.py", "config.py", "errors.py"}
    assert {path.name for path in (ROOT / "flowgrpo").iterdir() if path.is_file()} == door


def test_no_file_is_longer_than_four_hundred_lines():
    long = {name: lines for name, path in MODULES.items() if (lines := len(path.read_text().splitlines())) > 400}
    assert not long


def test_tests_lie_where_what_they_test_lies():
    """A file is named for a module or a package, and where that has several files, for its subject too."""
    tests = ROOT / "tests" / "flowgrpo"
    found = {path.relative_to(tests) for path in tests.rglob("test_*.py")} - set(map(Path, WIDER))
    misplaced = []
    for path in found:
        words = path.stem.removeprefix("test_").split("_")
        names = ["_".join(words[:count]) for count in range(1, len(words) + 1)]
        if not any(".".join(["flowgrpo", *path.parent.parts, name]) in MODULES for name in names):
            misplaced.append(path)
    assert not misplaced
    assert all((tests / path).is_file() for path in WIDER)


def test_no_test_file_is_longer_than_four_hundred_lines():
    files = sorted((ROOT / "tests").rglob("*.py"))
    assert not {str(path): lines for path in files if (lines := len(path.read_text().splitlines())) > 400}


def test_samplers_need_torch_and_diffusers_only():
    libraries = {name.partition(".")[0] for path in (ROOT / "samplers").rglob("*.py") for name in imported(path)}
    assert not libraries & {"peft", "accelerate", "transformers", "pydantic", "typer", "rich", "PIL"}
