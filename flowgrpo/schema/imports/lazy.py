"""Lazy imports, so that a command can refuse wrong input without loading PyTorch."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any


class lazy:
    """A stand-in for a module that imports it on the first attribute access.

    The stand-in is not in `sys.modules`. Code at module level must not access its attributes: use
    `with torch.no_grad():`, not `@torch.no_grad()`. Import names for annotations under `TYPE_CHECKING`.
    """

    def __init__(self, name: str):
        self._name = name
        self._module: ModuleType | None = None

    def __getattr__(self, attribute: str) -> Any:
        if self._module is None:
            self._module = import_module(self._name)
        return getattr(self._module, attribute)
