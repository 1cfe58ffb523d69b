"""The worst and the best held-out samples of a run's last evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from flowgrpo.commands.gallery.media import data_url, outline
from flowgrpo.commands.gallery.text import answer
from flowgrpo.commands.gallery.totals import Totals
from flowgrpo.errors import InputError
from flowgrpo.training.manifest import read_manifest

MOST = 4  # of either


@dataclass(frozen=True)
class Sample:
    """One sample with its total reward, and the rewards by name."""

    file: Path
    prompt: str
    seed: int | None
    _: KW_ONLY
    rewards: Mapping[str, float | None]
    total: float

    @property
    def is_text(self) -> bool:
        """Whether it is a text."""
        return self.file.suffix == ".json"

    @property
    def url(self) -> str:
        """Of its data: of a picture, moving or not, or a sound."""
        return data_url(self.file)

    @property
    def outline(self) -> str | None:
        """Of a sound, as an SVG path; None of anything else."""
        return outline(self.file)

    @property
    def answer(self) -> Markup:
        """Of a text, as HTML."""
        return answer(self.file)


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
        InputError: the manifest is damaged, or names a file that is not there.
    """
    folder = run / "samples"
    lines = read_manifest(folder)
    step = max((line.get("step", 0) for line in lines), default=0)
    totals = Totals.of(config)
    samples = []
    for line in lines:
        rewards = line.get("rewards", {})
        total = totals.total(rewards)
        if line.get("step", 0) != step or total is None:
            continue
        file = folder / line["file"]
        if not file.is_file():
            raise InputError(f"{folder / 'manifest.jsonl'}: there is no file {file}")
        samples.append(Sample(file, line["prompt"], line.get("seed"), rewards=rewards, total=total))
    if not samples:
        return None
    samples.sort(key=lambda sample: -sample.total)
    best = samples[: min(MOST, (len(samples) + 1) // 2)]
    worst = samples[::-1][: min(MOST, len(samples) // 2)]
    return Extremes(step, len(samples), best, worst)
