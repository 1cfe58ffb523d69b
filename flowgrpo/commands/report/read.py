"""Read the content of a report from the files of a run."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from flowgrpo.commands.page_parts.folder import input_errors, read_config, read_log
from flowgrpo.commands.page_parts.history import PartCurve, held_out_means, of_phase, part_curves
from flowgrpo.commands.page_parts.numbers import Mean
from flowgrpo.commands.page_parts.totals import Totals, watched_names
from flowgrpo.commands.report import curves
from flowgrpo.commands.report.asked import Facts, clips, describe_environment, describe_settings
from flowgrpo.commands.report.cost import Cost, cost
from flowgrpo.commands.report.extremes import Extremes, extremes
from flowgrpo.commands.report.signals import OfStep, Signal, by_step, signals
from flowgrpo.commands.report.spectrum import Spectrum, spectrum
from flowgrpo.commands.report.watched import Verdict, verdict
from flowgrpo.training.run.run_files import read_metrics
from rewards.base import one_line

LAST = 50  # shown warnings


@dataclass(frozen=True, kw_only=True)
class Report:
    """Content of a report."""

    name: str
    done: int  # iterations so far
    iterations: int | None  # of the whole run
    written: str  # time of the last metrics, UTC
    headline: tuple[Mean, Mean] | None  # held-out reward before training and now
    asked: Facts
    versions: Facts
    config: str  # text of config.yaml
    cost: Cost | None
    curve: str | None
    parts: list[PartCurve]
    names: list[str]  # of the rewards in `evaluations`
    evaluations: list[curves.Evaluation]
    signals: list[Signal]
    by_step: list[OfStep]
    verdict: Verdict
    extremes: Extremes | None
    spectrum: Spectrum
    warnings: list[str]  # last lines of log.txt
    warned: int  # number of all lines

    @property
    def state(self) -> str:
        """Progress of the run in words."""
        if not self.done:
            return "no iteration yet"
        of = "" if self.iterations is None else f" of {self.iterations}"
        return f"iteration {self.done}{of}"


def read(run: Path) -> Report:
    """Read the files of a run; raise InputError if one is damaged or not of a run."""
    with input_errors(run):
        return _read(run)


def _read(run: Path) -> Report:
    config, metrics = read_config(run), read_metrics(run)
    trained, watched = Totals.of(config).names, watched_names(config)
    means = held_out_means(metrics)
    log = read_log(run)
    written = run / "metrics.jsonl"
    return Report(
        name=run.resolve().name,
        done=max((line["step"] for line in of_phase(metrics, "train")), default=0),
        iterations=config["train"]["iterations"] if config else None,
        written=f"{datetime.fromtimestamp(written.stat().st_mtime, UTC):%Y-%m-%d %H:%M} UTC"
        if written.is_file()
        else "",
        headline=(means[0], means[1]) if len(means) > 1 else None,
        asked=describe_settings(config),
        versions=describe_environment(run),
        config=(run / "config.yaml").read_text(encoding="utf-8") if config else "",
        cost=cost(metrics),
        curve=curves.total_curve(metrics),
        parts=part_curves(metrics, trained, watched, "{} by iteration"),
        names=[*trained, *watched],
        evaluations=curves.evaluations(metrics, [*trained, *watched]),
        signals=signals(metrics, clips=clips(config)),
        by_step=by_step(metrics),
        verdict=verdict(metrics, watched, config["eval"]["watch"] if config else 1),
        extremes=extremes(run, config),
        spectrum=spectrum(run, config),
        warnings=[one_line(line) for line in log[-LAST:]],
        warned=len(log),
    )
