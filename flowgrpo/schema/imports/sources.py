"""Sources of modules, read without importing what they import."""

from __future__ import annotations

import ast
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]  # of the packages


def source_file(module: str) -> Path:
    """Return the file of a module, without importing it; the packages above it are imported."""
    spec = find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin)


def place(module: str, line: int) -> str:
    """Return a line of a module as `file:line`, from the folder that holds the packages."""
    return f"{source_file(module).relative_to(ROOT).as_posix()}:{line}"


@cache
def definitions(module: str) -> dict[str, Any]:
    """Return the function, class, assignment or import that defines each name of a module."""
    found: dict[str, Any] = {}
    for node in ast.parse(source_file(module).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name: node for alias in node.names}
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id] = node
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = node
    return found
