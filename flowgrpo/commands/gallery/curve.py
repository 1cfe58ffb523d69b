"""The reward curve as an inline SVG: held-out points on a line over the training reward, with axes that read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from markupsafe import escape

from flowgrpo.commands.gallery.numbers import number

WIDTH, HEIGHT = 640, 240
PART = 340, 180  # the size of one of several
LEFT, RIGHT, TOP, BOTTOM = 46, 12, 14, 30  # the left margin holds labels of five letters
LETTER = 7.5

Points = Sequence[tuple[float, float]]
Band = Sequence[tuple[float, float, float]]  # a place on the x axis, and a low and a high value there
NO_BANDS: Mapping[str, Band] = MappingProxyType({})


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
    width, height = size
    edges = [(x, y) for band in bands.values() for x, *ends in band for y in ends]
    everything = [*held_out, *train, *edges]
    ticks_x = _ticks(0, max(x for x, _ in everything), 6, whole=True)
    ticks_y = _ticks(min(y for _, y in everything), max(y for _, y in everything), 5)
    span_x = ticks_x[0], max(ticks_x[-1], max(x for x, _ in everything))
    span_y = ticks_y[0], ticks_y[-1]

    left = LEFT + LETTER * max(0, max(len(f"{y:g}") for y in ticks_y) - 5)

    def place(x: float, y: float) -> tuple[float, float]:
        u = (x - span_x[0]) / (span_x[1] - span_x[0])
        v = (y - span_y[0]) / (span_y[1] - span_y[0])
        return left + u * (width - left - RIGHT), height - BOTTOM - v * (height - TOP - BOTTOM)

    parts = [f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}">']
    for y in ticks_y:
        _, py = place(span_x[0], y)
        parts.append(f'<line class="grid" x1="{left:g}" x2="{width - RIGHT}" y1="{py:.1f}" y2="{py:.1f}"/>')
        parts.append(f'<text x="{left - 8:g}" y="{py + 4:.1f}" text-anchor="end">{y:g}</text>')
    for x in ticks_x:
        px, _ = place(x, span_y[0])
        parts.append(f'<text x="{px:.1f}" y="{height - 10}" text-anchor="middle">{x:g}</text>')
    for name, band in bands.items():
        if len(band) > 1:
            around = [*((x, high) for x, _, high in band), *((x, low) for x, low, _ in reversed(band))]
            path = " ".join(f"{px:.1f},{py:.1f}" for px, py in (place(*p) for p in around))
            parts.append(f'<polygon class="band {name}" points="{path}"/>')
    for name, points in (("train", train), ("held-out", held_out)):
        if points:
            path = " ".join(f"{px:.1f},{py:.1f}" for px, py in (place(*p) for p in points))
            parts.append(f'<polyline class="{name}" points="{path}"/>')
    for x, y in held_out:
        px, py = place(x, y)
        parts.append(
            f'<circle class="held-out" cx="{px:.1f}" cy="{py:.1f}" r="3.5"><title>step {x:g}: {number(y)}</title></circle>'
        )
    parts.append("</svg>")
    return "".join(parts)


def _ticks(low: float, high: float, count: int, whole: bool = False) -> list[float]:
    """Round values that enclose [low, high], about `count` of them."""
    raw = max(high - low, 1e-9) / (count - 1)
    power = 10 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    step = max(1, round(step)) if whole else step
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 10) for i in range(first, max(last, first + 1) + 1)]
