"""Modules that are imported when they are first used, so that a command which refuses its input has not loaded PyTorch."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any


class lazy:
    """Stands for the module of a name, and imports it at the first attribute that is asked for.

    It stays out of `sys.modules`. Where annotations are strings, what they name is imported under `TYPE_CHECKING`; nothing
    may ask for an attribute while a module is imported, so `@torch.no_grad()` becomes `with torch.no_grad():`.
    """

    def __init__(self, name: str):
        self._name = name
        self._module: ModuleType | None = None

    def __getattr__(self, attribute: str) -> Any:
        if self._module is None:
            self._module = import_module(self._name)
        return getattr(self._module, attribute)
