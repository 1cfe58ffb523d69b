"""`flowgrpo report`: the settings, costs and results of a run, as an HTML page or as Markdown."""

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
