"""The worst and the best held-out samples of a run's last evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowgrpo.commands.page_parts.cards import Card, read_lines, show
from flowgrpo.commands.page_parts.totals import Totals
from flowgrpo.errors import InputError

MOST = 4  # of the best, and of the worst


@dataclass(frozen=True)
class Extremes:
    """The best and the worst samples, most extreme first; `count` is the number of samples with a reward."""

    step: int
    count: int
    best: list[Card]
    worst: list[Card]


def extremes(run: Path, config: Mapping[str, Any]) -> Extremes | None:
    """Return the extremes of a run's last evaluation, each sample once at most; None if no kept sample has a reward.

    Raises:
        InputError: the manifest or a text is damaged, or the manifest names a missing file.
        MediaError: a picture, a video or a sound is damaged.
    """
    folder = run / "samples"
    lines = read_lines(folder)
    step = max((line["step"] for line in lines), default=0)
    trained = Totals.of(config)
    totals = [(trained.total(line["rewards"]), line) for line in lines if line["step"] == step]
    ranked = sorted(((total, line) for total, line in totals if total is not None), key=lambda each: -each[0])
    if not ranked:
        return None

    def card(line: Mapping[str, Any]) -> Card:
        file = folder / line["file"]
        if not file.is_file():
            raise InputError(f"{folder / 'manifest.jsonl'}: there is no file {file}")
        return Card(line["prompt"], line["seed"], [show(folder, line, trained, (0.0, 0.0))])

    best = ranked[: min(MOST, (len(ranked) + 1) // 2)]
    worst = ranked[::-1][: min(MOST, len(ranked) // 2)]
    return Extremes(step, len(ranked), [card(line) for _, line in best], [card(line) for _, line in worst])
