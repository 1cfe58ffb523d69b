"""The report as one self-contained page."""

from __future__ import annotations

from flowgrpo.commands.page_parts.media import LONGEST
from flowgrpo.commands.page_parts.numbers import counts, difference, number
from flowgrpo.commands.page_parts.pages import template
from flowgrpo.commands.report.read import Report

PACKAGE = "flowgrpo.commands.report"


def page(report: Report, *, live: str | None = None) -> str:
    """Return the HTML of a report; `live` is the digest of the run's state for `flowgrpo watch`."""
    return template("report.html.jinja", PACKAGE).render(
        report=report,
        drawn=[signal for signal in report.signals if not signal.constant],
        constant=[signal for signal in report.signals if signal.constant],
        live=live,
        longest=LONGEST,
        number=number,
        difference=difference,
        counts=counts,
    )


def unreadable(name: str, sentence: str, live: str) -> str:
    """Return the HTML of a live page whose run cannot be read now; `sentence` says why."""
    return template("report.html.jinja", PACKAGE).render(name=name, sentence=sentence, live=live)
