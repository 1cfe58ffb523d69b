"""Reward curves as an inline SVG with axes that read: a run's held-out points over its training reward, or several runs'."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType

from markupsafe import escape

from flowgrpo.commands.gallery.numbers import compact, number

WIDTH, HEIGHT = 640, 240
PART = 340, 180  # the size of one of several
LEFT, RIGHT, TOP, BOTTOM = 46, 12, 14, 30  # the left margin holds labels of five letters
LETTER = 7.5
APART = 18  # pixels between two marks at the ends of lines

Points = Sequence[tuple[float, float]]
Band = Sequence[tuple[float, float, float]]  # a place on the x axis, and a low and a high value there
NO_BANDS: Mapping[str, Band] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class Series:
    """One line of a chart.

    Attributes:
        points: of it, (x, y).
        kind: its CSS classes.
        dotted: whether each point is a dot, which tells its numbers to who points at it.
        mark: a letter at the end of the line; None without one.
    """

    points: Points
    kind: str
    dotted: bool = False
    mark: str | None = None


def curve(
    held_out: Points,
    train: Points,
    size: tuple[int, int] = (WIDTH, HEIGHT),
    *,
    bands: Mapping[str, Band] = NO_BANDS,
    label: str = "reward by training step",
) -> str:
    """An SVG element of two series of (step, reward); colours come from the page's CSS variables.

    Args:
        size: its width and height in pixels, at which its letters are as large as the page's small ones.
        bands: the spread of `train` and `held-out`, of the class `band`.
        label: what a reader without eyes for it is told.
    """
    series = [Series(points=train, kind="train"), Series(points=held_out, kind="held-out", dotted=True)]
    return chart(series, size, bands=bands, label=label)


def chart(
    series: Sequence[Series],
    size: tuple[int, int] = (WIDTH, HEIGHT),
    unit: str = "step",
    *,
    bands: Mapping[str, Band] = NO_BANDS,
    label: str | None = None,
) -> str:
    """An SVG element of several series on one pair of axes, of which one at least has points.

    Args:
        size: as of `curve`.
        unit: of x: `step`, which are whole, or another word that stands behind its number.
        bands: by the kind of a series its spread.
        label: as of `curve`; by default that x is of this unit.
    """
    width, height = size
    edges = [(x, y) for band in bands.values() for x, *ends in band for y in ends]
    everything = [*(point for each in series for point in each.points), *edges]
    ticks_x = _ticks(0, max(x for x, _ in everything), 6, whole=unit == "step")
    ticks_y = _ticks(min(y for _, y in everything), max(y for _, y in everything), 5)
    span_x = ticks_x[0], max(ticks_x[-1], max(x for x, _ in everything))
    span_y = ticks_y[0], ticks_y[-1]

    left = LEFT + LETTER * max(0, max(len(f"{y:g}") for y in ticks_y) - 5)
    right = RIGHT + (LETTER if any(each.mark for each in series) else 0)

    def place(x: float, y: float) -> tuple[float, float]:
        u = (x - span_x[0]) / (span_x[1] - span_x[0])
        v = (y - span_y[0]) / (span_y[1] - span_y[0])
        return left + u * (width - left - right), height - BOTTOM - v * (height - TOP - BOTTOM)

    parts = [f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label or f"reward by {unit}")}">']
    for y in ticks_y:
        _, py = place(span_x[0], y)
        parts.append(f'<line class="grid" x1="{left:g}" x2="{width - right:g}" y1="{py:.1f}" y2="{py:.1f}"/>')
        parts.append(f'<text x="{left - 8:g}" y="{py + 4:.1f}" text-anchor="end">{y:g}</text>')
    for x in ticks_x:
        px, _ = place(x, span_y[0])
        parts.append(f'<text x="{px:.1f}" y="{height - 10}" text-anchor="middle">{compact(x)}</text>')
    for name, band in bands.items():
        if len(band) > 1:
            around = [*((x, high) for x, _, high in band), *((x, low) for x, low, _ in reversed(band))]
            path = " ".join(f"{px:.1f},{py:.1f}" for px, py in (place(*p) for p in around))
            parts.append(f'<polygon class="band {name}" points="{path}"/>')
    placed = [[place(*point) for point in each.points] for each in series]
    for each, way in zip(series, placed, strict=True):
        if way:
            path = " ".join(f"{px:.1f},{py:.1f}" for px, py in way)
            parts.append(f'<polyline class="{each.kind}" points="{path}"/>')
    for each, way in zip(series, placed, strict=True):
        for (x, y), (px, py) in zip(each.points, way, strict=True) if each.dotted else ():
            where = f"step {x:g}" if unit == "step" else f"{x:,.0f} {unit}"
            told = f"{where}: {number(y)}" if each.mark is None else f"{each.mark}, {where}: {number(y)}"
            parts.append(
                f'<circle class="{each.kind}" cx="{px:.1f}" cy="{py:.1f}" r="3.5"><title>{told}</title></circle>'
            )
    ends = {each.mark: (*way[-1], each.kind) for each, way in zip(series, placed, strict=True) if each.mark and way}
    levels = marks({mark: py for mark, (_, py, _) in ends.items()}, height - BOTTOM)
    for mark, level in levels.items():
        px, _, kind = ends[mark]
        parts.append(f'<text class="mark {kind}" x="{px + 7:.1f}" y="{level + 4:.1f}">{mark}</text>')
    parts.append("</svg>")
    return "".join(parts)


def marks(heights: dict[str, float], lowest: float) -> dict[str, float]:
    """Where the marks of line ends stand, in pixels from above: at the ends, or apart until none covers another.

    Args:
        heights: of the ends.
        lowest: where a mark may stand. Marks that do not all fit above it stand closer.
    """
    found = dict(sorted(heights.items(), key=lambda each: each[1]))
    order = list(found)
    apart = min(APART, (lowest - TOP) / max(len(order) - 1, 1))
    for above, below in pairwise(order):
        found[below] = max(found[below], found[above] + apart)
    limit = lowest
    for mark in reversed(order):
        found[mark] = min(found[mark], limit)
        limit = found[mark] - apart
    return found


def _ticks(low: float, high: float, count: int, whole: bool = False) -> list[float]:
    """Round values that enclose [low, high], about `count` of them."""
    raw = max(high - low, 1e-9) / (count - 1)
    power = 10 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    step = max(1, round(step)) if whole else step
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 10) for i in range(first, max(last, first + 1) + 1)]
