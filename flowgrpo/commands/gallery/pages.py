"""The templates of the pages."""

from __future__ import annotations

from functools import cache

from jinja2 import Environment, PackageLoader, Template


@cache
def template(name: str, package: str = "flowgrpo.commands.gallery") -> Template:
    """A template of a package, which takes a quarter of a second to compile; what it is given is escaped."""
    templates = Environment(loader=PackageLoader(package, "."), autoescape=True, trim_blocks=True)
    return templates.get_template(name)
