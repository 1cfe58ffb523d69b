"""The spectrum of a run's trees: how much the noise of each step decided about the reward."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowgrpo.commands.page_parts.forest import Forest
from flowgrpo.commands.page_parts.numbers import number
from flowgrpo.training.reports.tree_store import TreeFolder

WIDTH, HEIGHT, TOP, BOTTOM = 640, 180, 22, 40
LABELS = 12  # largest number of labelled bars

NO_TREES = (
    "The run kept no trees. With run.trees='{every: 8}' a run keeps the trees of every 8th iteration for this section."
)
NO_SIBLINGS = (
    "In the kept trees no state has several noisy children whose rewards are known, so the noise of single steps cannot be "
    "told apart. Methods of branches or brushes have them."
)
UNBRANCHED = ("chain", "window", "twigs")  # names of trees in which no state has several noisy children
EXPLAIN = "flowgrpo explain RUN --prompt 0 shows what each step decides."  # of flow models only


@dataclass(frozen=True)
class Bar:
    """A step, counted from 1: its noise level, and the standard deviation of siblings' rewards, averaged over the trees."""

    step: int
    level: str
    deviation: float


@dataclass(frozen=True)
class Spectrum:
    """The spectrum of one iteration; without bars, `sentence` says why."""

    bars: list[Bar]
    sentence: str

    @property
    def svg(self) -> str:
        """The bars, as an SVG element."""
        most = max(bar.deviation for bar in self.bars) or 1.0
        width = WIDTH / len(self.bars)
        parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="standard deviation by step">']
        for index, bar in enumerate(self.bars):
            height = (HEIGHT - TOP - BOTTOM) * bar.deviation / most
            middle, top = (index + 0.5) * width, HEIGHT - BOTTOM - height
            thick = min(width * 0.7, 72)
            parts.append(
                f'<rect class="bar" x="{middle - thick / 2:.1f}" y="{top:.1f}" width="{thick:.1f}" height="{height:.1f}">'
                f"<title>step {bar.step}: {number(bar.deviation, 2)}</title></rect>"
            )
            if index % math.ceil(len(self.bars) / LABELS) == 0:
                words = (
                    (top - 6, number(bar.deviation, 2)),
                    (HEIGHT - BOTTOM + 17, bar.step),
                    (HEIGHT - BOTTOM + 35, bar.level),
                )
                parts += [f'<text x="{middle:.1f}" y="{y:.1f}" text-anchor="middle">{word}</text>' for y, word in words]
        parts.append("</svg>")
        return "".join(parts)


def spectrum(run: Path, config: Mapping[str, Any]) -> Spectrum:
    """Return the spectrum of the last trees that a run of this config.yaml kept; raise InputError if one is damaged."""
    folder = TreeFolder(run)
    last = max(folder.sizes(), default=None)
    trees = [] if last is None else folder.read([last])
    if not trees:
        return Spectrum([], _describe_chains(config) or NO_TREES)
    deviations: dict[int, list[float]] = defaultdict(list)
    for tree in trees:
        for spread in Forest(tree).spreads:
            deviations[spread.step].append(spread.deviation)
    if not deviations:
        return Spectrum([], _describe_chains(config) or NO_SIBLINGS)
    sigmas, texts = trees[0].sigmas, trees[0].nodes[0].text is not None
    levels = [f"{sigma:.0%}" if texts else f"σ {sigma:.2f}" for sigma in sigmas]
    bars = [Bar(step + 1, levels[step], sum(of_trees) / len(of_trees)) for step, of_trees in sorted(deviations.items())]
    most = max(bars, key=lambda bar: bar.deviation)
    mean = f", mean of {len(trees)} trees" if len(trees) > 1 else ""
    return Spectrum(
        bars,
        f"How far the rewards of siblings lie apart by the noise of the step that made them (standard deviation{mean} of "
        f"iteration {last}). The noise of step {most.step} decides most.",
    )


def _describe_chains(config: Mapping[str, Any]) -> str | None:
    """Say that the method of a run has chains, and what to use instead; None if its trees branch, or without a config."""
    algorithm = config.get("algorithm", {})
    if algorithm.get("tree", {}).get("name") not in UNBRANCHED:
        return None
    sentence = f"This section needs trees with branches; {algorithm['preset']} has chains."
    return f"{sentence} {EXPLAIN}" if config["kind"] == "flow" else sentence
