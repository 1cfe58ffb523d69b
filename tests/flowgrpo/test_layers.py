"""Imports point down only, by a table of packages; flow models and texts never meet, and no two files import each other.

The tests of the packages lie as the packages do.
"""

import ast
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Each package with those that it imports, no more and no fewer. What stands above a package is never imported by it.
BELOW = {
    "samplers": "",
    "rewards": "",
    "rewards.jail": "",
    "flowgrpo.errors": "",
    "flowgrpo.shapes": "",
    "flowgrpo.schema": "errors rewards",
    "flowgrpo.data": "errors shapes schema rewards samplers",
    "flowgrpo.conditions": "data",
    "flowgrpo.training": "errors schema data rewards samplers",
    "flowgrpo.training.engine": "errors schema training rewards samplers",
    "flowgrpo.flow.methods": "errors schema training rewards samplers",
    "flowgrpo.flow.pipeline": "errors schema data training rewards samplers",
    "flowgrpo.flow.engine": "errors schema data training training.engine flow.pipeline rewards samplers",
    "flowgrpo.flow": (
        "errors schema data training training.engine flow.methods flow.pipeline flow.engine rewards samplers"
    ),
    "flowgrpo.mdlm.decoding": "errors schema training rewards samplers",
    "flowgrpo.mdlm.methods": "errors schema training mdlm.decoding rewards samplers",
    "flowgrpo.mdlm.engine": "errors schema training training.engine mdlm.decoding samplers",
    "flowgrpo.mdlm": (
        "errors schema data training training.engine mdlm.decoding mdlm.methods mdlm.engine rewards samplers"
    ),
    "flowgrpo.config": "errors schema data flow mdlm rewards",
    "flowgrpo.commands.gallery": "errors data training rewards",
    "flowgrpo.commands.report": "errors data training commands.gallery rewards",
    "flowgrpo.commands": (
        "errors schema data training flow flow.pipeline mdlm config commands.gallery commands.report rewards samplers"
    ),
    "flowgrpo.cli": "errors schema data training config commands commands.gallery rewards",
    "flowgrpo": "flow.pipeline commands",
    "flowgrpo.__main__": "cli",
}
BELOW = {
    name: {other if other in ("rewards", "samplers") else f"flowgrpo.{other}" for other in below.split()}
    for name, below in BELOW.items()
}

# Test files below tests/flowgrpo that test no one module, and what they test.
WIDER = {
    "test_layers.py": "what imports what",
    "test_calls.py": "how many arguments go by place",
    "test_overrides.py": "which methods are marked as overriding",
    "test_docs.py": "what the pages name",
    "test_docs_commands.py": "the commands that the pages show",
    "test_packaging.py": "what is installed",
    "test_door.py": "what the command and the package import, and what they give",
    "mdlm/test_llada_gsm8k.py": "the built-in config llada-8b",
}

TOP = ("flowgrpo", "rewards", "samplers")
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for top in TOP
    for path in sorted((ROOT / top).rglob("*.py"))
}


@cache
def imported(path):
    """Full names of what a file imports, at its top or inside a function."""
    return tuple(_imported(path))


def _imported(path):
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


def met(modules):
    """Each of some modules' packages with those that it imports."""
    found = {package_of(module): set() for module in modules}
    for module in modules:
        others = {package_of(other) for other in map(module_of, imported(MODULES[module])) if other}
        found[package_of(module)] |= others - {package_of(module)}
    return found


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_down(module):
    ((own, others),) = met([module]).items()
    assert others <= BELOW[own], f"{module} imports {others - BELOW[own]}, which does not stand below {own}"


def test_the_table_allows_nothing_that_is_not_used():
    assert met(MODULES) == BELOW


def test_the_house_has_few_floors_and_arrows():
    """Rooms are the top folders, the folders of flowgrpo with all that is in them, and its single files."""

    def room(package):
        return ".".join(package.split(".")[: 2 if package.startswith("flowgrpo.") else 1])

    scripts = {name for path in (ROOT / "scripts").glob("*.py") for name in map(module_of, imported(path)) if name}
    arrows = {(room(name), room(other)) for name, below in BELOW.items() for other in below}
    arrows |= {("scripts", room(package_of(module))) for module in scripts}
    arrows = {(above, below) for above, below in arrows if above != below}
    floors = {name: 1 for arrow in arrows for name in arrow}
    for _ in list(floors):  # each room a floor above the highest that it imports
        for above, below in arrows:
            floors[above] = max(floors[above], 1 + floors[below])
    assert max(floors.values()) <= 9
    assert len(arrows) <= 60


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
    door = {"__init__.py", "__main__.py", "cli.py", "config.py", "errors.py", "py.typed"}
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
