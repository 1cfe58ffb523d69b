"""A method that redefines an inherited one says so by `@override`, and none says so that redefines nothing."""

from collections.abc import Iterator
from importlib import import_module
from inspect import isclass, isfunction
from pkgutil import walk_packages

import flowgrpo


def classes() -> list[type]:
    """Every class of the package; `__main__` has none, and would run."""
    names = [
        found.name for found in walk_packages(flowgrpo.__path__, "flowgrpo.") if not found.name.endswith("__main__")
    ]
    return sorted({one for name in names for one in vars(import_module(name)).values() if ours(one)}, key=str)


def ours(one: object) -> bool:
    return isclass(one) and one.__module__.startswith("flowgrpo.")


def methods(one: type) -> Iterator[tuple[str, bool]]:
    """The name of each method and property that a class defines by itself, and whether it is marked."""
    for name, member in vars(one).items():
        function = member.fget if isinstance(member, property) else member
        if isfunction(function) and (name == "__call__" or not name.startswith("__")):
            yield name, getattr(function, "__override__", False)


def test_every_override_is_marked():
    unmarked = [
        f"{one.__module__}.{one.__name__}.{name}"
        for one in classes()
        for name, marked in methods(one)
        if not marked and any(name in vars(base) for base in one.__mro__[1:] if ours(base))
    ]
    assert unmarked == []


def test_what_is_marked_overrides_something():
    marked = [(one, name) for one in classes() for name, marked in methods(one) if marked]
    stray = [
        f"{one.__module__}.{one.__name__}.{name}"
        for one, name in marked
        if not any(name in vars(base) for base in one.__mro__[1:])
    ]
    assert stray == []
    assert marked
