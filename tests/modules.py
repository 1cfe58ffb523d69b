"""Our modules, and what each imports, as they are written."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
TOP = ("flowgrpo", "rewards", "samplers")
PROGRAMS = sorted(path for top in ("research", "scripts") for path in (ROOT / top).rglob("*.py"))
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for top in TOP
    for path in sorted((ROOT / top).rglob("*.py"))
}


@cache
def imported(path):
    """Name in full what a file imports, at its top or inside a function."""
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
    """Return our module that an imported name is of, or None."""
    while name and name not in MODULES:
        name = name.rpartition(".")[0]
    return name or None
