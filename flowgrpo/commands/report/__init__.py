"""The report: one page, or Markdown, that a team can file of a run: what was asked, what it cost, what came of it."""

from __future__ import annotations

from pathlib import Path

from flowgrpo.commands.report.markdown import markdown
from flowgrpo.commands.report.page import page
from flowgrpo.commands.report.read import read
from flowgrpo.errors import InputError
from flowgrpo.training.run.run_folder import check_writable, replace_text


def write_report(run: Path, out: Path) -> Path:
    """Write the report of a run to `out`, all at once, and return it: Markdown where it ends in .md, else a page.

    Raises:
        InputError: a file of the run is damaged, or the report cannot be written.
    """
    if out.exists() and not out.is_file():  # a folder, or a device, which would be replaced
        raise InputError(f"--out: {out} is there and no ordinary file; name one, such as report.html")
    check_writable(out.parent, str(out))
    report = read(run)
    written = markdown(report, out.parent) if out.suffix == ".md" else page(report)
    out.parent.mkdir(parents=True, exist_ok=True)
    replace_text(out, written)
    return out
