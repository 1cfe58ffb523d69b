"""The worst and the best held-out samples of a run's last evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from flowgrpo.commands.gallery.media import data_url, outline
from flowgrpo.commands.gallery.text import answer
from flowgrpo.commands.gallery.totals import Totals
from flowgrpo.errors import InputError
from flowgrpo.training.run.run_files import read_manifest
from rewards.files import suffixes

MOST = 4  # of either


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One sample.

    Attributes:
        rewards: by name.
        total: of those that are trained on.
        url: of its data, a picture's (moving or not) or a sound's; None of a text.
        outline: of a sound, as an SVG path; None of anything else.
        answer: of a text, as HTML; None of anything else.
    """

    file: Path
    prompt: str
    seed: int | None
    rewards: Mapping[str, float | None]
    total: float
    url: str | None
    outline: str | None
    answer: Markup | None


@dataclass(frozen=True)
class Extremes:
    """The best samples, best first, and the worst, worst first, of `count` that the run kept of its evaluation at `step`."""

    step: int
    count: int
    best: list[Sample]
    worst: list[Sample]


def extremes(run: Path, config: Mapping[str, Any]) -> Extremes | None:
    """Return the extremes of a run's last evaluation; None where it kept no sample with a reward.

    No sample is among both.

    Raises:
        InputError: the manifest or a text is damaged, or names a file that is not there.
        MediaError: a picture, a video or a sound is damaged.
    """
    folder = run / "samples"
    lines = read_manifest(folder)
    step = max((line.get("step", 0) for line in lines), default=0)
    totals = Totals.of(config)
    of_step = [(totals.total(line.get("rewards", {})), line) for line in lines if line.get("step", 0) == step]
    ranked = sorted(((total, line) for total, line in of_step if total is not None), key=lambda each: -each[0])
    if not ranked:
        return None
    best = ranked[: min(MOST, (len(ranked) + 1) // 2)]
    worst = ranked[::-1][: min(MOST, len(ranked) // 2)]
    return Extremes(
        step,
        len(ranked),
        best=[_sample(folder, line, total) for total, line in best],
        worst=[_sample(folder, line, total) for total, line in worst],
    )


def _sample(folder: Path, line: Mapping[str, Any], total: float) -> Sample:
    file = folder / line["file"]
    if not file.is_file():
        raise InputError(f"{folder / 'manifest.jsonl'}: there is no file {file}")
    text = suffixes.suffix_of(file) in suffixes.TEXTS
    return Sample(
        file=file,
        prompt=line["prompt"],
        seed=line.get("seed"),
        rewards=line["rewards"],
        total=total,
        url=None if text else data_url(file),
        outline=None if text else outline(file),
        answer=answer(file) if text else None,
    )
