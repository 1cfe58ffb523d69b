"""Draw reward curves with axes as inline SVG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType

from markupsafe import escape

from flowgrpo.commands.page_parts.numbers import compact, number

WIDTH, HEIGHT = 640, 240
PART = 340, 180  # width and height of a small chart, one of several
LEFT, RIGHT, TOP, BOTTOM = 46, 12, 14, 30  # margins; the left one holds labels of five letters
LETTER = 7.5
APART = 18  # pixels between two marks at line ends

Points = Sequence[tuple[float, float]]
Band = Sequence[tuple[float, float, float]]  # x, low y, high y
NO_BANDS: Mapping[str, Band] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class Series:
    """A line of a chart with CSS classes `kind`, optional dots with tooltips, and an optional letter at its end."""

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
    """Draw the held-out and the training rewards by step, as `chart` does; `bands` has the keys `train` and `held-out`."""
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
    """Draw several series on one pair of axes; at least one of them has points.

    Args:
        unit: name of the x axis; for `step` the ticks are whole numbers.
        bands: shaded spread of a series, by `Series.kind`.
        label: for screen readers; by default "reward by `unit`".
    """
    width, height = size
    edges = [(x, y) for band in bands.values() for x, *ends in band for y in ends]
    every_point = [*(point for each in series for point in each.points), *edges]
    ticks_x = _ticks(0, max(x for x, _ in every_point), 6, whole=unit == "step")
    span_x = ticks_x[0], max(ticks_x[-1], max(x for x, _ in every_point))
    span_y, ticks_y = _levels(min(y for _, y in every_point), max(y for _, y in every_point))

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
    for each, pixels in zip(series, placed, strict=True):
        if pixels:
            path = " ".join(f"{px:.1f},{py:.1f}" for px, py in pixels)
            parts.append(f'<polyline class="{each.kind}" points="{path}"/>')
    for each, pixels in zip(series, placed, strict=True):
        for (x, y), (px, py) in zip(each.points, pixels, strict=True) if each.dotted else ():
            where = f"step {x:g}" if unit == "step" else f"{x:,.0f} {unit}"
            title = f"{where}: {number(y)}" if each.mark is None else f"{each.mark}, {where}: {number(y)}"
            parts.append(
                f'<circle class="{each.kind}" cx="{px:.1f}" cy="{py:.1f}" r="3.5"><title>{title}</title></circle>'
            )
    ends = {
        each.mark: (*pixels[-1], each.kind) for each, pixels in zip(series, placed, strict=True) if each.mark and pixels
    }
    levels = marks({mark: py for mark, (_, py, _) in ends.items()}, height - BOTTOM)
    for mark, level in levels.items():
        px, _, kind = ends[mark]
        parts.append(f'<text class="mark {kind}" x="{px + 7:.1f}" y="{level + 4:.1f}">{mark}</text>')
    parts.append("</svg>")
    return "".join(parts)


def marks(heights: dict[str, float], lowest: float) -> dict[str, float]:
    """Return the y positions (pixels from the top) of marks at line ends, moved so that none overlap or pass `lowest`."""
    levels = dict(sorted(heights.items(), key=lambda item: item[1]))
    order = list(levels)
    apart = min(APART, (lowest - TOP) / max(len(order) - 1, 1))
    for above, below in pairwise(order):
        levels[below] = max(levels[below], levels[above] + apart)
    limit = lowest
    for mark in reversed(order):
        levels[mark] = min(levels[mark], limit)
        limit = levels[mark] - apart
    return levels


def _levels(low: float, high: float) -> tuple[tuple[float, float], list[float]]:
    """Return the ends and ticks of a y axis; one tick, in the middle, of values within 1e-4 of their size or within 1e-8."""
    near = 1e-4 * max(abs(low), abs(high), 1e-4)
    if high - low < near:
        middle = sum((low, high)) / 2  # 0, not -0, of two zeros
        return (middle - near, middle + near), [middle]
    ticks = _ticks(low, high, 5)
    return (ticks[0], ticks[-1]), ticks


def _ticks(low: float, high: float, count: int, whole: bool = False) -> list[float]:
    """Return about `count` round values that enclose [low, high]."""
    raw = max(high - low, 1e-9) / (count - 1)
    power = 10 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    step = max(1, round(step)) if whole else step
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 10) for i in range(first, max(last, first + 1) + 1)]
