"""Write pages: compiled templates, checks of the output path before the work, and atomic writes."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from jinja2 import Environment, PackageLoader, Template

from flowgrpo.errors import InputError
from flowgrpo.training.run.run_folder import check_writable, replace_text


@cache
def template(name: str, package: str = "flowgrpo.commands.page_parts") -> Template:
    """Return a compiled template, which escapes its values; cached, since compiling takes a quarter of a second."""
    templates = Environment(loader=PackageLoader(package, "."), autoescape=True, trim_blocks=True)
    return templates.get_template(name)


def check_out(out: Path, example: str) -> None:
    """Refuse an output that cannot be written, or is a folder or a device; the error suggests an `example` name."""
    if out.exists() and not out.is_file():
        raise InputError(f"--out: {out} is there and no ordinary file; name one, such as {example}")
    check_writable(out.parent, str(out))


def write_page(out: Path, text: str) -> Path:
    """Write a page atomically, so that a reader never sees half of it, and return its path."""
    out.parent.mkdir(parents=True, exist_ok=True)
    replace_text(out, text)
    return out
