"""What a report tells of a run, read from the files in its folder."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flowgrpo.commands.gallery.history import held_out_means
from flowgrpo.commands.gallery.numbers import Mean
from flowgrpo.commands.gallery.totals import Totals, name_of
from flowgrpo.commands.report import curves
from flowgrpo.commands.report.asked import Facts, asked, clips, versions
from flowgrpo.commands.report.cost import Cost, cost
from flowgrpo.commands.report.extremes import Extremes, extremes
from flowgrpo.commands.report.signals import OfStep, Signal, by_step, signals
from flowgrpo.commands.report.spectrum import Spectrum, spectrum
from flowgrpo.commands.report.watched import Verdict, verdict
from flowgrpo.data.yaml_maps import read_map
from flowgrpo.errors import InputError
from flowgrpo.training.run.run_files import read_metrics
from rewards.base import one_line
from rewards.files.media import MediaError

LAST = 50  # warnings that are told


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a report tells of a run.

    Attributes:
        done: iterations so far.
        iterations: of the whole run; None where it is unknown.
        written: when the run wrote its metrics last, UTC; empty before it did.
        headline: held-out reward before training and now; None before the second evaluation, or where one has none.
        config: config.yaml, as it stands there.
        names: of the rewards in `evaluations`.
        warnings: the last of `warned`, that is all, lines of log.txt.
    """

    name: str
    done: int
    iterations: int | None
    written: str
    headline: tuple[Mean, Mean] | None
    asked: Facts
    versions: Facts
    config: str
    cost: Cost | None
    curve: str | None
    parts: list[curves.Curve]
    names: list[str]
    evaluations: list[curves.Evaluation]
    signals: list[Signal]
    by_step: list[OfStep]
    verdict: Verdict
    extremes: Extremes | None
    spectrum: Spectrum
    warnings: list[str]
    warned: int

    @property
    def state(self) -> str:
        """How far the run is, in words."""
        if not self.done:
            return "no iteration yet"
        of = "" if self.iterations is None else f" of {self.iterations}"
        return f"iteration {self.done}{of}"


def read(run: Path) -> Report:
    """Return what the files of a run tell.

    Raises:
        InputError: one is damaged, or not of a run.
    """
    try:
        return _read(run)
    except MediaError as error:
        raise InputError(f"{run}: {error}") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{run}: its config.yaml or metrics.jsonl is not of a run ({error!r})") from error


def _read(run: Path) -> Report:
    file, told = run / "config.yaml", run / "metrics.jsonl"
    config: dict[str, Any] = read_map(file) if file.is_file() else {}
    lines = read_metrics(run)
    trained, watched = Totals.of(config).names, [name_of(use) for use in config.get("eval_rewards", [])]
    means = held_out_means(lines)
    log = run / "log.txt"
    warnings = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else []
    return Report(
        name=run.resolve().name,
        done=max((line["step"] for line in lines if line["phase"] == "train"), default=0),
        iterations=config["train"]["iterations"] if config else None,
        written=f"{datetime.fromtimestamp(told.stat().st_mtime, UTC):%Y-%m-%d %H:%M} UTC" if told.is_file() else "",
        headline=(means[0], means[1]) if len(means) > 1 else None,
        asked=asked(config),
        versions=versions(run),
        config=file.read_text(encoding="utf-8") if config else "",
        cost=cost(lines),
        curve=curves.total_curve(lines),
        parts=curves.part_curves(lines, trained, watched),
        names=[*trained, *watched],
        evaluations=curves.evaluations(lines, [*trained, *watched]),
        signals=signals(lines, clips=clips(config)),
        by_step=by_step(lines),
        verdict=verdict(lines, watched, config["eval"]["watch"] if config else 1),
        extremes=extremes(run, config),
        spectrum=spectrum(run),
        warnings=[one_line(line) for line in warnings[-LAST:]],
        warned=len(warnings),
    )
