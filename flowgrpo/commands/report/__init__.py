"""`flowgrpo report`: one page, or Markdown, of what was asked of a run, what it cost and what came of it."""

from __future__ import annotations

from pathlib import Path

from flowgrpo.commands.page_parts.pages import check_out, write_page
from flowgrpo.commands.report.markdown import markdown
from flowgrpo.commands.report.page import page
from flowgrpo.commands.report.read import read


def write_report(run: Path, out: Path) -> Path:
    """Write the report as Markdown (.md) or HTML and return its path; raise InputError if the run is damaged."""
    check_out(out, "report.html")
    report = read(run)
    return write_page(out, markdown(report, out.parent) if out.suffix == ".md" else page(report))
