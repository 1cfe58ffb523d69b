"""Draw the figures of docs/: the loop, the trees of the presets, and the curves of the league.

    python scripts/make_figures.py [FOLDER]

Writes loop.svg, trees_kinds.svg and league.svg into FOLDER, docs/figures by default. Trees come from the plans of the
presets. Curves come from docs/research/league.json, which `research/compare_methods.py report --curves` writes. Each picture
has colours for a light and for a dark page.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flowgrpo import config
from flowgrpo.commands.page_parts.curve import Band, Series, chart
from samplers.trees import TRUNK, TWIG, Move, Plan

ROOT = Path(__file__).parents[1]
STEPS = 10
STEP, ROW = 48, 22  # pixels of a step and of a sample
SPLIT = 4  # children that are drawn one by one
TREES = {  # presets, and what their trees are for
    "flow_grpo": "chain: noise at every step, one reward for all of them",
    "flow_grpo_fast": "window: noise at a few steps, an ODE for the rest",
    "tempflow": "brush: children of every state of an ODE trunk",
    "adaptive": "brush: more children where rewards vary most, here late",
    "branch_grpo": "branch: samples share their first steps, then split",
    "branch_grpo_mix": "branch window: splits and noise at a few steps",
    "dense_grpo": "twigs: an ODE completion of every state, for its reward",
    "awm_late": "late split: children of one state, trained below it",
}
PROFILE = [3, 3, 3, 4, 4, 6, 9, 14, 30]  # children at each step of the adaptive tree, which a run finds
STYLE = """
:root { color-scheme: light dark; --ink: #1f2430; --soft: #626b80; --line: #c3c8d4; --box: #eef0fb;
  --a: #3f51b5; --b: #b45309; --c: #0f766e; --d: #be185d; --e: #6b7280; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8eaf2; --soft: #a3abbd; --line: #454c5e; --box: #262b3d;
  --a: #9fa8ff; --b: #fbb04b; --c: #4fd1c0; --d: #f48fb8; --e: #9ca3af; } }
text { font: 13px system-ui, sans-serif; fill: var(--ink); }
.soft { fill: var(--soft); font-size: 12px; }
.head { font-weight: 600; }
.box { fill: var(--box); stroke: var(--a); }
.arrow { stroke: var(--soft); fill: none; stroke-width: 1.5; marker-end: url(#tip); }
.tip { fill: var(--soft); }
.grid { stroke: var(--line); }
polyline, path { fill: none; stroke-width: 2; stroke-linejoin: round; }
circle { stroke: none; }
.ode { stroke: var(--line); }
.trained { stroke: var(--a); }
.noisy { stroke: var(--c); }
.twig { stroke: var(--b); stroke-dasharray: 2 4; }
.state { fill: var(--soft); }
.decoded { fill: var(--ink); }
.count { fill: var(--a); font-size: 11px; font-weight: 600; }
""" + "\n".join(
    f"polyline.{name} {{ stroke: var(--{name}); }} polygon.{name} {{ fill: var(--{name}); opacity: .16; }} "
    f"circle.{name}, text.{name} {{ fill: var(--{name}); }}"
    for name in "abcde"
)


def drawing(width: float, height: float, label: str, parts: Sequence[str]) -> str:
    """Return a whole SVG file."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" role="img"'
    tip = (
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path class="tip" d="M0 0 L8 4 L0 8 z" style="fill: var(--soft)"/></marker></defs>'
    )
    return "\n".join([f'{head} aria-label="{label}">', f"<style>{STYLE}</style>", tip, *parts, "</svg>"]) + "\n"


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    """Return one line of text."""
    return f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{words}</text>'


def box(x: float, y: float, width: float, lines: Sequence[str]) -> list[str]:
    """Return a box with a heading and smaller lines, 84 pixels high."""
    middle = x + width / 2
    rest = [text(middle, y + 46 + 18 * i, line, "soft", "middle") for i, line in enumerate(lines[1:])]
    frame = f'<rect class="box" x="{x:g}" y="{y:g}" width="{width:g}" height="84" rx="8"/>'
    return [frame, text(middle, y + 24, lines[0], "head", "middle"), *rest]


def arrow(path: str, at: tuple[float, float], words: str) -> list[str]:
    """Return an arrow along an SVG path, with words centred at a point."""
    return [f'<path class="arrow" d="{path}"/>', text(*at, words, "soft", "middle")]


def draw_loop() -> str:
    """Return the picture of one iteration: what is computed, and what flows between."""
    parts = [
        *box(10, 40, 168, ["Rollout", "your diffusers pipeline,", "our scheduler, a tree"]),
        *box(284, 40, 168, ["Rewards", "your functions, judges,", "built-in models"]),
        *box(558, 40, 168, ["Credit", "which step earned it,", "compared with its group"]),
        *box(558, 206, 168, ["Update", "replay, log-probability,", "objective, optimizer"]),
        *box(10, 206, 168, ["Policy", "adapters or all weights,", "checkpoints"]),
        *box(284, 206, 168, ["Evaluation", "held-out prompts,", "fixed seeds, gallery"]),
        *arrow("M178 82 L282 82", (230, 74), "decoded"),
        text(230, 100, "samples", "soft", "middle"),
        *arrow("M452 82 L556 82", (504, 74), "rewards"),
        *arrow("M642 124 L642 204", (650, 168), ""),
        text(652, 168, "advantages", "soft"),
        *arrow("M558 272 C520 322 220 322 180 272", (369, 324), "new weights"),
        *arrow("M178 236 L282 236", (230, 228), "averaged"),
        text(230, 254, "weights", "soft", "middle"),
        *arrow("M94 206 L94 126", (0, 0), ""),
        text(104, 168, "weights, seeded noise", "soft"),
        *arrow("M178 112 C300 176 420 176 556 220", (384, 146), "states, log-probabilities"),
        *arrow("M10 20 C40 4 70 10 86 38", (0, 0), ""),
        text(100, 24, "prompts", "soft"),
    ]
    return drawing(740, 336, "One iteration of training", parts)


def wave(left: float, right: float, y: float) -> str:
    """Return a path of small waves between two points of equal height."""
    count = max(2, 2 * round((right - left) / 14))
    step = (right - left) / count
    return f"M{left:g} {y:g} q{step / 2:g} -5 {step:g} 0 " + f"t{step:g} 0 " * (count - 1)


def grow(plan: Plan, role: str, step: int, row: int, stops: tuple[int, ...] = ()) -> tuple[list[str], float, int]:
    """Draw the subtree of a node; return its shapes, the node's height in rows, and the first row below the subtree.

    A node that splits into at most four equal children shows each; larger numbers of children share a line.
    """
    if step == STEPS:
        return [dot(step, row, "decoded")], row, row + 1
    moves = (Move(role=role, ode_stops=stops),) if stops else plan(role, step)
    onward = [move for move in moves if move.role == role]
    sides = [move for move in moves if move.role != role]
    split = len(onward) > 0 and onward[0].count <= SPLIT
    ahead = onward * onward[0].count if split else onward
    shapes, ends, below = [], [], row if onward else row + 1
    for move in [*ahead, *sides]:
        following, *rest = move.ode_stops or (step + 1,)
        drawn, height, below = grow(plan, move.role, following, below, tuple(rest))
        shapes += drawn
        ends.append((move, following, height))
    heights = [height for move, _, height in ends if move in onward]
    own = (heights[0] + heights[-1]) / 2 if heights else row
    edges = [shape for move, following, height in ends for shape in draw_edge(move, step, following, own, height)]
    edges += [
        text(STEP * (step + following) / 2, ROW * height - 7, f"× {move.count}", "count", "middle")
        for move, following, height in ends
        if move.count > 1 and not (split and move in onward)
    ]
    return [*edges, *shapes, dot(step, own, "state")], own, below


def draw_edge(move: Move, step: int, following: int, above: float, height: float) -> list[str]:
    """Return an edge: from the height of its state to its own, then onward."""
    left, right, y = STEP * step, STEP * following, ROW * height
    kind = "twig" if move.role == TWIG else "ode"
    if move.kernel.stochastic:
        kind = "trained" if move.trained else "noisy"
    path = wave(left, right, y) if move.kernel.stochastic else f"M{left} {y:g} L{right} {y:g}"
    parts = [f'<path class="ode" d="M{left} {ROW * above:g} L{left} {y:g}"/>'] if height != above else []
    return [*parts, f'<path class="{kind}" d="{path}"/>']


def dot(step: int, height: float, kind: str) -> str:
    """Return the mark of a state."""
    return f'<circle class="{kind}" cx="{STEP * step}" cy="{ROW * height:g}" r="{5 if kind == "decoded" else 3}"/>'


def draw_trees() -> str:
    """Return the picture of the trees of some presets, each drawn from its plan."""
    parts, height = [], [30.0, 30.0]
    for preset, words in TREES.items():
        side = min((0, 1), key=height.__getitem__)
        left, top = 20 + 580 * side, height[side]
        settings = {"model": {"path": "shapes"}, "algorithm": {"preset": preset}, "train": {"group_size": 24}}
        settings["algorithm"] |= {"tree": {"profile": PROFILE}} if preset == "adaptive" else {}
        found = config.validate(settings)
        plan = found.algorithm.plan(found.algorithm.kernel.kernels(STEPS), found.train.group_size, found.run.seed, 0)
        shapes, _, rows = grow(plan, TRUNK, 0, 0)
        parts += [text(left, top, preset, "head"), text(left, top + 20, words, "soft")]
        parts += [f'<g transform="translate({left + 6} {top + 52})">', *shapes, "</g>"]
        height[side] += 52 + ROW * rows + 34
    end = max(height)
    legend = [("trained", "noise, trained"), ("noisy", "noise"), ("ode", "ODE"), ("twig", "ODE, for a reward only")]
    for at, (kind, words) in enumerate(legend):
        x = 26 + 180 * at
        path = wave(x, x + 48, end) if kind in ("trained", "noisy") else f"M{x} {end} L{x + 48} {end}"
        parts += [f'<path class="{kind}" d="{path}"/>', text(x + 58, end + 4, words, "soft")]
    for x, kind, radius, words in ((780, "state", 3, "state"), (860, "decoded", 5, "sample with a reward")):
        parts += [f'<circle class="{kind}" cx="{x}" cy="{end}" r="{radius}"/>', text(x + 12, end + 4, words, "soft")]
    return drawing(1100, end + 20, "The trees of eight presets", parts)


def draw_league(curves: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the held-out rewards of methods by model evaluations, with standard errors over seeds, a chart for each task.

    Args:
        curves: by task, the `seeds` and the `methods`: lists of [evaluations, mean reward, standard error].
    """
    parts = []
    for at, (task, found) in enumerate(curves.items()):
        ranked = sorted(found["methods"].items(), key=lambda method: -method[1][-1][1])
        kinds = dict(zip((name for name, _ in ranked), "abcde", strict=False))
        series = [Series(points=[point[:2] for point in points], kind=kinds[name]) for name, points in ranked]
        bands: dict[str, Band] = {
            kinds[name]: [(cost, mean - error, mean + error) for cost, mean, error in points] for name, points in ranked
        }
        left = 20 + 520 * at
        drawn = chart(series, (500, 280), "model evaluations", bands=bands, label=f"held-out reward on {task}")
        parts += [text(left, 24, f"{task}: held-out reward, {found['seeds']} seeds", "head")]
        parts += [drawn.replace("<svg ", f'<svg x="{left}" y="34" width="500" height="280" overflow="visible" ', 1)]
        parts += [text(left + 273, 328, "model evaluations of training", "soft", "middle")]
        for row, (name, _) in enumerate(ranked):
            y = 352 + 20 * row
            parts += [f'<polyline class="{kinds[name]}" points="{left + 46},{y} {left + 74},{y}"/>']
            parts += [text(left + 82, y + 4, name, "soft")]
    rows = max(len(found["methods"]) for found in curves.values())
    return drawing(1060, 352 + 20 * rows, "The league: held-out reward by model evaluations", parts)


def main() -> None:
    """Write all figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "docs" / "figures", metavar="FOLDER")
    out = parser.parse_args().folder
    league = json.loads((ROOT / "docs/research/league.json").read_text())
    for name, figure in {"loop": draw_loop(), "trees_kinds": draw_trees(), "league": draw_league(league)}.items():
        (out / f"{name}.svg").write_text(figure)


if __name__ == "__main__":
    main()
