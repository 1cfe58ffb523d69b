"""The report as Markdown, for a model card or a pull request: tables and sentences without curves."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import quote

from flowgrpo.commands.page_parts.cards import Card
from flowgrpo.commands.page_parts.numbers import Mean, counts, difference, number
from flowgrpo.commands.report.cost import Cost
from flowgrpo.commands.report.extremes import Extremes
from flowgrpo.commands.report.read import Report
from flowgrpo.commands.report.signals import Signal
from flowgrpo.commands.report.watched import Verdict
from flowgrpo.data import tables
from flowgrpo.training.reports.markdown import escape, fence, table_row
from rewards.files import suffixes

LONGEST = 600  # characters of a text; the rest is cut off


def markdown(report: Report, folder: Path) -> str:
    """Return a report as Markdown whose links to samples are relative to `folder`."""
    return "\n".join(_lines(report, folder))


def _lines(report: Report, folder: Path) -> Iterator[str]:
    written = f", written {report.written}" if report.written else ""
    yield f"# Report of {escape(report.name)}\n\n{report.state}{written}\n"
    if report.headline is not None:
        before, after = report.headline
        gain = difference(before.value, after.value)
        of = f"; {counts(before, after)}" if before.count != after.count else ""
        yield f"Mean held-out reward: {_mean(before)} before training, **{_mean(after)}** now ({gain}{of}).\n"
    if facts := [*report.asked, *report.versions]:
        yield from _table("What was asked", ["", ""], [[label, escape(text)] for label, text in facts])
    if report.config:
        yield f"<details><summary>config.yaml</summary>\n\n{fence('yaml', report.config.rstrip())}\n\n</details>\n"
    if report.cost is not None:
        yield from _cost(report.cost)
    if report.evaluations:
        head = ["iteration", "held-out reward", *(escape(name) for name in report.names)]
        rows = [[str(e.step), _mean(e.mean), *map(number, e.parts)] for e in report.evaluations]
        yield from _table("Evaluations", head, rows)
    if report.signals:
        yield from _signals(report.signals)
    if report.by_step:
        rows = [[str(each.step), number(each.log_ratio), number(each.kl)] for each in report.by_step]
        yield from _table("Ratio and KL, by step", ["step", "size of the log-ratio", "KL"], rows)
    yield from _verdict(report.verdict)
    yield from _spectrum(report)
    if report.extremes is not None:
        yield from _extremes(report.extremes, folder)
    yield from _warnings(report)


def _mean(mean: Mean | None) -> str:
    if mean is None:
        return "–"
    return number(mean.value) + (f" ± {number(mean.error, 2)}" if mean.error is not None else "")


def _table(title: str | None, head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table of Markdown cells, with or without a heading."""
    if title is not None:
        yield f"## {title}\n"
    yield table_row(head)
    yield table_row(["---"] * len(head))
    yield from map(table_row, rows)
    yield ""


def _cost(cost: Cost) -> Iterator[str]:
    rows = [
        [p.name, f"{p.seconds:.1f}", f"{p.share}%", f"{p.evaluations:,}", f"{p.decoded:,}"]
        for p in (*cost.phases, cost.total)
    ]
    yield from _table("What it cost", ["phase", "seconds", "share", "model evaluations", "samples decoded"], rows)
    yield f"{cost.sentence}\n"


def _signals(signals: Sequence[Signal]) -> Iterator[str]:
    rows = [[signal.name, *signal.summary, signal.meaning] for signal in signals]
    yield from _table("Groups and policy, by iteration", ["", "first", "mean", "last", "largest", "is"], rows)


def _verdict(verdict: Verdict) -> Iterator[str]:
    yield "## Watched rewards\n"
    for alarm in verdict.alarms:
        yield f"**{escape(alarm)}**\n"
    if not verdict.alarms:
        yield f"{verdict.sentence}\n"
    if verdict.watched:
        head = ["watched only", "first", "last", "falls in a row while the trained reward rises"]
        rows = [[escape(w.name), number(w.first), number(w.last), str(w.streak)] for w in verdict.watched]
        yield from _table(None, head, rows)


def _spectrum(report: Report) -> Iterator[str]:
    yield f"## The spectrum of its trees\n\n{report.spectrum.sentence}\n"
    if report.spectrum.bars:
        rows = [[str(bar.step), escape(bar.level), number(bar.deviation, 2)] for bar in report.spectrum.bars]
        yield from _table(None, ["step", "noise", "standard deviation"], rows)


def _extremes(extremes: Extremes, folder: Path) -> Iterator[str]:
    for title, cards in (("Best samples", extremes.best), ("Worst samples", extremes.worst)):
        if cards:
            title = f"{title} of {extremes.count} after iteration {extremes.step}"
            head = ["sample", "prompt", "seed", "reward", "rewards"]
            yield from _table(title, head, [_sample_row(card, folder) for card in cards])


def _sample_row(card: Card, folder: Path) -> list[str]:
    (sample,) = card.samples
    if sample.answer is not None:
        shown = escape(_cut(str(tables.document(sample.file)["text"])))
    else:
        is_picture = suffixes.suffix_of(sample.file) in suffixes.BROWSER_PICTURES
        shown = f"{'!' * is_picture}[sample]({quote(os.path.relpath(sample.file, folder))})"
    return [
        shown,
        escape(_cut(card.prompt)),
        "–" if card.seed is None else str(card.seed),
        number(sample.reward),
        ", ".join(f"{escape(name)} {number(value)}" for name, value in sample.rewards.items()),
    ]


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."


def _warnings(report: Report) -> Iterator[str]:
    yield "## Open warnings\n"
    if not report.warned:
        yield "None in log.txt.\n"
        return
    left = f", the last {len(report.warnings)}" if report.warned > len(report.warnings) else ""
    yield f"{report.warned} in log.txt{left}:\n"
    yield fence("text", "\n".join(report.warnings)) + "\n"
