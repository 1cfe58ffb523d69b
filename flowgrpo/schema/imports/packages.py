"""Which version of a package is here."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def installed(name: str) -> str:
    """The version of a package; in words where none is installed, as in a checkout that is run as it lies there."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
