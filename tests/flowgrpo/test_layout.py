"""Where files lie, and how long they and their folders are."""

from collections import Counter
from pathlib import Path

from modules import MODULES, ROOT

# Test files below tests/flowgrpo that test no one module, and what they test.
WIDER = {
    "test_layers.py": "what imports what",
    "test_layout.py": "where files lie",
    "test_calls.py": "how many arguments go by place",
    "test_overrides.py": "which methods are marked as overriding",
    "test_first_mistakes.py": "what is said of a first hour's mistakes",
    "test_docs.py": "what the pages name",
    "test_docs_commands.py": "the commands that the pages show",
    "test_notebooks.py": "the code of the notebooks",
    "test_packaging.py": "what is installed",
    "test_door.py": "what the command and the package import, and what they give",
    "mdlm/test_llada_gsm8k.py": "the built-in config llada-8b",
}


def test_no_folder_holds_more_than_twelve_modules():
    counts = Counter(path.parent for path in MODULES.values() if path.name != "__init__.py")
    assert not {str(folder): count for folder, count in counts.items() if count > 12}


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


def test_every_folder_of_modules_is_a_package():
    """Else a wheel would leave it out."""
    assert not [str(path) for path in MODULES.values() if not (path.parent / "__init__.py").is_file()]
