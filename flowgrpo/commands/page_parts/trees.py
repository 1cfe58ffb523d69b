"""The page of a run's trees: how they grew, the reward of each branch, and the advantage of each edge."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowgrpo.commands.page_parts.folder import read_config
from flowgrpo.commands.page_parts.forest import Forest
from flowgrpo.commands.page_parts.numbers import difference, number, share
from flowgrpo.commands.page_parts.pages import check_out, template, write_page
from flowgrpo.errors import InputError
from flowgrpo.training.reports.tree_store import KeptNode, TreeFolder

LARGEST = 12 << 20  # bytes of kept trees; of more, the page shows fewer iterations
TREES = "trees.html"  # in a run's folder
SIDE = 56  # pixels of a picture's longer side
GAP = 24  # pixels between two columns
BELOW = 14  # pixels between two rows, which hold the bar of a reward
LEFT, TOP = 24, 8


@dataclass(frozen=True)
class Drawing:
    """Layout of a forest on its page, in pixels."""

    forest: Forest

    @property
    def tile(self) -> tuple[float, float]:
        """Width and height of a picture in pixels."""
        width, height = self.forest.tree.size
        scale = SIDE / max(width, height)
        return width * scale, height * scale

    def x(self, step: int) -> float:
        """Return the left edge of the column of a step."""
        return LEFT + step * (self.tile[0] + GAP)

    def y(self, place: int) -> float:
        """Return the top edge of the node with the index `place`."""
        return TOP + self.forest.rows[place] * (self.tile[1] + BELOW)

    @property
    def size(self) -> tuple[float, float]:
        """Width and height of the drawing."""
        steps = len(self.forest.tree.sigmas)
        return self.x(steps) - GAP + LEFT, TOP + (max(self.forest.rows) + 1) * (self.tile[1] + BELOW)

    @property
    def columns(self) -> list[dict[str, Any]]:
        """Each step of the schedule: its left edge with half a gap, its noise level, and the spread of siblings' rewards
        after the step before it.
        """
        spreads = {spread.step + 1: number(spread.deviation, 2) for spread in self.forest.spreads}
        levels = [f"{sigma:.0%}" if self.texts else f"σ {sigma:.2f}" for sigma in self.forest.tree.sigmas]
        return [
            {"x": self.x(step) - GAP / 2, "step": step, "level": level, "spread": spreads.get(step)}
            for step, level in enumerate(levels)
        ]

    @property
    def texts(self) -> bool:
        """Whether the states are canvases of texts."""
        return self.forest.nodes[0].text is not None

    @property
    def spots(self) -> list[dict[str, Any]]:
        """Each node: its position in pixels, its depth (1 for a root), its picture, its reward's bar, and its label."""
        spots = []
        for place, node in enumerate(self.forest.nodes):
            what = "sample" if not node.estimated else "canvas" if self.texts else "predicted"
            earned = "" if node.advantage is None else f", advantage {number(node.advantage)}"
            spot = {
                "place": place,
                "x": self.x(node.step),
                "y": self.y(place),
                "level": len(self.forest.path(place)),
                "picture": node.picture,
                "bar": share(node.total, *self.forest.bounds),
                "label": f"step {node.step}, {what}, reward {number(node.total)}{earned}",
                "kind": f"{what}{' twig' if node.twig else ''}{'' if node.picture else ' unseen'}",
            }
            spots.append(spot)
        return spots

    @property
    def lines(self) -> list[dict[str, Any]]:
        """Each edge, those with the largest advantages last and so on top."""
        width, height = self.tile
        lines = []
        for place, node in enumerate(self.forest.nodes):
            if node.parent is None:
                continue
            parent = self.forest.nodes[node.parent]
            x0, y0 = self.x(parent.step) + width, self.y(node.parent) + height / 2
            x1, y1 = self.x(node.step), self.y(place) + height / 2
            middle = x1 - GAP / 2
            path = f"M{x0:.1f} {y0:.1f}H{middle - GAP / 2:.1f}C{middle:.1f} {y0:.1f} {middle:.1f} {y1:.1f} {x1:.1f} {y1:.1f}"
            thickness = 1.2 + 3.8 * self._strength(node)
            lines.append({"place": place, "path": path, "kind": _edge_kind(node), "width": thickness})
        return sorted(lines, key=lambda line: line["width"])

    def _strength(self, node: KeptNode) -> float:
        largest = self.forest.largest_advantage
        return abs(node.advantage) / largest if node.updated and node.advantage is not None and largest else 0.0

    @property
    def details(self) -> list[dict[str, Any]]:
        """Data of each node and of the path to it, which the page shows when the node is selected."""
        return [self._detail(place, node) for place, node in enumerate(self.forest.nodes)]

    def _detail(self, place: int, node: KeptNode) -> dict[str, Any]:
        largest = self.forest.largest_rise(place)
        return {
            "parent": node.parent,
            "step": node.step,
            "row": self.forest.rows[place],
            "text": node.text,
            "facts": self._facts(place, node),
            "most": None if largest is None else largest.node,
            "way": [
                [
                    rise.node,
                    f"step {self.forest.nodes[rise.node].step}",
                    number(rise.after),
                    difference(rise.before, rise.after),
                ]
                for rise in self.forest.rises(place)
            ],
        }

    def _facts(self, place: int, node: KeptNode) -> list[tuple[str, str]]:
        forest = self.forest
        level = f"{node.sigma:.0%} masked" if self.texts else f"σ {node.sigma:.3f}"
        facts = [("step", f"{node.step} of {len(forest.tree.sigmas) - 1}, {level}")]
        if node.seed is not None:
            facts.append(("starts from", f"seed {node.seed}"))
        if node.total is not None:
            facts.append(("reward, predicted" if node.estimated else "reward", number(node.total)))
        if len(forest.tree.names) > 1:
            facts += [(name, number(reward)) for name, reward in zip(forest.tree.names, node.rewards, strict=False)]
        if forest.children[place]:
            value, mean = forest.ode_values[place], forest.values[place]
            facts += [("value", f"{number(value)}, where ODE leads")] if value is not None and not self.texts else []
            facts += [("mean beyond", number(mean))] if mean is not None else []
        if node.parent is None:
            return facts
        noise = "" if self.texts else f", noise {number(node.noise, 2)}" if node.noise else ", no noise"
        facts.append(("came by", f"{node.kernel}{noise}"))
        if node.log_prob is not None:
            facts.append(("log-probability", number(node.log_prob, 4)))
        if node.unit is None:
            facts.append(("credit", "none of its own"))
            return facts
        if node.advantage is not None:
            facts.append(("advantage", f"{'+' if node.advantage > 0 else ''}{number(node.advantage)}"))
        others = forest.mates[node.compared] - 1
        facts.append(("comparison set", f"unit {node.unit} and {others} other{'s' if others != 1 else ''}"))
        facts.append(("weight in the loss", number(node.weight) if node.updated else "not trained on"))
        return facts

    @property
    def sentence(self) -> str:
        """Summary of the tree."""
        forest = self.forest
        if forest.best is None:
            return "No sample of it has a reward."
        totals, best = list(forest.ends.values()), forest.ends[forest.best]
        mean = number(sum(totals) / len(totals))
        words = f"The best of {len(totals)} samples has reward {number(best)}, their mean is {mean}."
        rise = forest.largest_rise(forest.best)
        if rise is None:
            return words
        step = forest.nodes[rise.node].step
        return (
            f"{words} On its way the predicted reward rose most in step {step}: "
            f"{number(rise.before)} → {number(rise.after)} ({difference(rise.before, rise.after)})."
        )


def _edge_kind(node: KeptNode) -> str:
    if not node.trained:
        return "plain"
    if not node.updated:
        return "pruned"
    return "plus" if (node.advantage or 0) > 0 else "minus" if (node.advantage or 0) < 0 else "zero"


def shown_steps(sizes: dict[int, int]) -> set[int]:
    """Choose iterations by `sizes` (bytes): the first, the last, and evenly spaced ones that fit in `LARGEST`."""
    steps = sorted(sizes)
    most = len(steps) if not sizes else min(len(steps), LARGEST // max(1, min(sizes.values())))
    for count in range(most, 2, -1):
        chosen = {steps[round(i * (len(steps) - 1) / (count - 1))] for i in range(count)}
        if sum(sizes[step] for step in chosen) <= LARGEST:
            return chosen
    return {steps[0], steps[-1]} if steps else set()


def check_trees(run: Path) -> None:
    """Refuse damaged trees among those that the page would show, read one iteration at a time."""
    folder = TreeFolder(run)
    for step in shown_steps(folder.sizes()):
        folder.read([step])


def write_trees(run: Path, out: Path) -> Path:
    """Write the page of a run's trees; raise InputError if there are none, one is damaged, or the page cannot be written."""
    check_out(out, "trees.html")
    folder = TreeFolder(run)
    trees = folder.read(shown_steps(folder.sizes()))
    if not trees:
        raise InputError(
            f"{run}: it kept no trees; train again with run.trees='{{every: 8}}' (flow models only without "
            "run.engine and data.groups)"
        )
    by_step = defaultdict(list)
    for tree in trees:
        by_step[tree.step].append(Drawing(Forest(tree)))
    iterations = [{"step": step, "drawings": drawings} for step, drawings in sorted(by_step.items())]
    algorithm = read_config(run).get("algorithm")
    page = template("trees.html.jinja").render(
        name=run.resolve().name,
        method=algorithm.get("preset") if isinstance(algorithm, dict) else None,
        iterations=iterations,
        texts=Drawing(Forest(trees[0])).texts,
        gap=GAP,
        number=number,
    )
    return write_page(out, page)
