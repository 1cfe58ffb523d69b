"""`flowgrpo report`: one page, or Markdown, of what was asked of a run, what it cost and what came of it."""

from __future__ import annotations

from pathlib import Path

from flowgrpo.commands.gallery.pages import check_out, write_page
from flowgrpo.commands.report.markdown import markdown
from flowgrpo.commands.report.page import page
from flowgrpo.commands.report.read import read


def write_report(run: Path, out: Path) -> Path:
    """Write the report of a run and return its path: Markdown if it ends in .md, else HTML.

    Raises:
        InputError: a file of the run is damaged, or the report cannot be written.
    """
    check_out(out, "report.html")
    report = read(run)
    return write_page(out, markdown(report, out.parent) if out.suffix == ".md" else page(report))
