"""Modules that are imported when they are first used, so that a command which refuses its input has not loaded PyTorch."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any


class lazy:
    """Stands for the module of a name, and imports it at the first attribute that is asked for.

    It stays out of `sys.modules`. Where annotations are strings, what they name is imported under `TYPE_CHECKING`; nothing
    may ask for an attribute while a module is imported, so `@torch.no_grad()` becomes `with torch.no_grad():`.
    """

    def __init__(self, name: str):
        self._name, self._module = name, None

    def __getattr__(self, attribute: str) -> Any:
        if self._module is None:
            with _without_collections():
                self._module = import_module(self._name)
        return getattr(self._module, attribute)


@contextmanager
def _without_collections() -> Iterator[None]:
    """Look for no garbage meanwhile: an import makes a million objects, most of which stay, and is over sooner.

    Afterwards they are among the oldest objects, as if each had outlived its collections.
    """
    if not gc.isenabled():  # somebody looks for garbage at times of their own
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if not gc.get_freeze_count():  # else what somebody has put aside would come back
            gc.freeze()
            gc.unfreeze()
        gc.enable()
