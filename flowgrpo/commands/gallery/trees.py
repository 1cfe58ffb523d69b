"""The page of trees: how they grew, which branch earned what, and what the update was told of each edge."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

from flowgrpo.commands.gallery.forest import Forest
from flowgrpo.commands.gallery.numbers import difference, number, share
from flowgrpo.commands.gallery.pages import template
from flowgrpo.data.yaml_maps import read_map
from flowgrpo.errors import InputError
from flowgrpo.training.folders import check_writable, replace_text
from flowgrpo.training.kept_trees import COLUMNS, KeptNode, TreeFolder

LARGEST = 12 << 20  # bytes of kept trees, above which the page has fewer iterations than were kept
TREES = "trees.html"  # in a run's folder
SIDE = 56  # of a picture in a tree, pixels
GAP = 30  # between two columns
BELOW = 14  # between two rows, with the bar of a reward
LEFT, TOP = 24, 8


@dataclass(frozen=True)
class Spot:
    """A node as it is drawn, in pixels.

    Attributes:
        tile: of its picture, in the sheet; None without one.
        bar: how long the bar of its reward is, in percent; None without one.
        label: what a reader without eyes for it is told.
    """

    place: int
    x: float
    y: float
    _: KW_ONLY
    tile: tuple[int, int] | None
    bar: int | None
    label: str
    kind: str


@dataclass(frozen=True)
class Line:
    """An edge as it is drawn: an SVG path, its class, and how wide it is."""

    place: int
    path: str
    kind: str
    width: float


@dataclass(frozen=True)
class Column:
    """The states after so many steps: their noise level in words, and what the noise of the last step decided."""

    x: float
    step: int
    level: str
    spread: str | None


@dataclass(frozen=True)
class Drawing:
    """A forest as it is drawn."""

    forest: Forest
    sheet: Path | None

    @property
    def tile(self) -> tuple[float, float]:
        """Width and height of a picture on the page."""
        width, height = self.forest.tree.tile
        scale = SIDE / max(width, height, 1) if width else 1
        return (width * scale, height * scale) if width else (SIDE, SIDE)

    @property
    def sheet_size(self) -> tuple[int, int]:
        """Width and height of all its pictures."""
        width, height = self.forest.tree.tile
        count = sum(node.tile is not None for node in self.forest.nodes)
        return min(count, COLUMNS) * width, -(-count // COLUMNS) * height

    @property
    def url(self) -> str | None:
        """Its pictures."""
        if self.sheet is None:
            return None
        return f"data:image/webp;base64,{base64.b64encode(self.sheet.read_bytes()).decode()}"

    def x(self, step: int) -> float:
        """The left side of a column."""
        return LEFT + step * (self.tile[0] + GAP)

    def y(self, place: int) -> float:
        """The upper side of a node."""
        return TOP + self.forest.rows[place] * (self.tile[1] + BELOW)

    @property
    def size(self) -> tuple[float, float]:
        """Width and height."""
        steps = len(self.forest.tree.sigmas)
        return self.x(steps) - GAP + LEFT, TOP + (max(self.forest.rows) + 1) * (self.tile[1] + BELOW)

    @property
    def columns(self) -> list[Column]:
        """Of the schedule."""
        spreads = {spread.step + 1: number(spread.deviation, 2) for spread in self.forest.spreads}
        return [
            Column(self.x(step), step, f"{sigma:.0%}" if self.texts else f"σ {sigma:.2f}", spreads.get(step))
            for step, sigma in enumerate(self.forest.tree.sigmas)
        ]

    @property
    def texts(self) -> bool:
        """Whether its states are canvases of texts."""
        return self.forest.nodes[0].text is not None

    @property
    def spots(self) -> list[Spot]:
        """Its nodes."""
        width, height = self.forest.tree.tile
        found = []
        for place, node in enumerate(self.forest.nodes):
            tile = None
            if node.tile is not None:
                row, column = divmod(node.tile, COLUMNS)
                tile = column * width, row * height
            what = "sample" if not node.estimated else "canvas" if self.texts else "foretold"
            found.append(
                Spot(
                    place,
                    self.x(node.step),
                    self.y(place),
                    tile=tile,
                    bar=share(node.total, *self.forest.bounds),
                    label=f"step {node.step}, {what}, reward {number(node.total)}",
                    kind=f"{what}{' twig' if node.role == 'twig' else ''}{'' if tile else ' unseen'}",
                )
            )
        return found

    @property
    def lines(self) -> list[Line]:
        """Its edges, those that earned most last, so that they lie on top."""
        width, height = self.tile
        found = []
        for place, node in enumerate(self.forest.nodes):
            if node.parent is None:
                continue
            parent = self.forest.nodes[node.parent]
            x0, y0 = self.x(parent.step) + width, self.y(node.parent) + height / 2
            x1, y1 = self.x(node.step), self.y(place) + height / 2
            middle = x1 - GAP / 2
            path = f"M{x0:.1f} {y0:.1f}H{middle - GAP / 2:.1f}C{middle:.1f} {y0:.1f} {middle:.1f} {y1:.1f} {x1:.1f} {y1:.1f}"
            found.append((self._strength(node), Line(place, path, _kind(node), 1.2 + 3.8 * self._strength(node))))
        return [line for _, line in sorted(found, key=lambda each: each[0])]

    def _strength(self, node: KeptNode) -> float:
        largest = self.forest.largest_advantage
        return abs(node.advantage) / largest if node.updated and node.advantage is not None and largest else 0.0

    @property
    def told(self) -> list[dict[str, Any]]:
        """What the page tells of each node that is asked for, as pairs of words."""
        return [
            {
                "parent": node.parent,
                "step": node.step,
                "row": self.forest.rows[place],
                "reward": node.total,
                "text": node.text,
                "facts": self._facts(place, node),
            }
            for place, node in enumerate(self.forest.nodes)
        ]

    def _facts(self, place: int, node: KeptNode) -> list[tuple[str, str]]:
        forest = self.forest
        level = f"{node.sigma:.0%} masked" if self.texts else f"σ {node.sigma:.3f}"
        facts = [("step", f"{node.step} of {len(forest.tree.sigmas) - 1}, {level}")]
        if node.seed is not None:
            facts.append(("starts from", f"seed {node.seed}"))
        if node.total is not None:
            word = "reward, foretold" if node.estimated else "reward"
            facts.append((word, number(node.total)))
            if len(forest.tree.names) > 1:
                facts += [(name, number(reward)) for name, reward in zip(forest.tree.names, node.rewards, strict=True)]
        if forest.children[place] and forest.values[place] is not None:
            facts.append(("value", f"{number(forest.values[place])}, mean of the samples beyond"))
        if node.parent is None:
            return facts
        noise = f"noise {number(node.noise, 2)}" if node.noise else "no noise"
        facts.append(("came by", f"{node.kernel}" if self.texts else f"{node.kernel}, {noise}"))
        if node.log_prob is not None:
            facts.append(("log-probability", number(node.log_prob, 4)))
        if node.unit is None:
            facts.append(("credit", "none: nothing is compared here"))
            return facts
        if node.advantage is not None:
            facts.append(("advantage", f"{'+' if node.advantage > 0 else ''}{number(node.advantage)}"))
        mates = {other.unit for other in forest.nodes if other.unit is not None and other.compared == node.compared}
        facts.append(("compared", f"unit {node.unit} with {len(mates) - 1} others"))
        facts.append(("weight in the loss", number(node.weight) if node.updated else "not trained on"))
        return facts

    @property
    def sentence(self) -> str:
        """What a look at the tree tells first."""
        forest = self.forest
        if forest.best is None:
            return "No sample of it has a reward."
        totals = [forest.nodes[end].total for end in forest.ends]
        best = forest.nodes[forest.best].total
        mean = number(sum(totals) / len(totals))
        words = f"The best of {len(totals)} samples has reward {number(best)}, their mean is {mean}."
        rise = forest.largest_rise(forest.best)
        if rise is None:
            return words
        step = forest.nodes[rise.node].step
        return (
            f"{words} On its way the reward of the picture that the model foretells rose most in step {step}: "
            f"{number(rise.before)} → {number(rise.after)} ({difference(rise.before, rise.after)})."
        )


def _kind(node: KeptNode) -> str:
    """The class of an edge."""
    if node.unit is None and not node.trained:
        return "plain"
    if not node.updated:
        return "pruned"
    return "plus" if (node.advantage or 0) > 0 else "minus" if (node.advantage or 0) < 0 else "zero"


@dataclass(frozen=True)
class Iteration:
    """The drawings of one iteration."""

    step: int
    drawings: Sequence[Drawing]


def shown_steps(sizes: dict[int, int]) -> set[int]:
    """The iterations to show, of those with their sizes in bytes: all, or as many, evenly apart, as a page can hold.

    The first and the last are among them.
    """
    steps = sorted(sizes)
    for count in range(len(steps), 2, -1):
        chosen = {steps[round(i * (len(steps) - 1) / (count - 1))] for i in range(count)}
        if sum(sizes[step] for step in chosen) <= LARGEST:
            return chosen
    return {steps[0], steps[-1]} if steps else set()


def write_trees(run: Path, out: Path) -> Path:
    """Write the page of a run's trees to `out`, all at once.

    Raises:
        InputError: the run kept none, one is damaged, or the page cannot be written.
    """
    if out.exists() and not out.is_file():  # a folder, or a device, which would be replaced
        raise InputError(f"--out: {out} is there and no ordinary file; name one, such as trees.html")
    folder = TreeFolder(run)
    kept = folder.read(shown_steps(folder.sizes()))
    if not kept:
        raise InputError(
            f"{run}: it kept no trees; train with run.trees={{every: 8}}, and it keeps those of every 8th iteration"
        )
    check_writable(out.parent, str(out))
    by_step: dict[int, list[Drawing]] = {}
    for tree, sheet in kept:
        by_step.setdefault(tree.step, []).append(Drawing(Forest(tree), sheet))
    config = read_map(run / "config.yaml") if (run / "config.yaml").is_file() else {}
    method = config.get("algorithm", {}).get("preset")
    iterations = [Iteration(step, drawings) for step, drawings in sorted(by_step.items())]
    out.parent.mkdir(parents=True, exist_ok=True)
    page, texts = template("trees.html.jinja"), iterations[0].drawings[0].texts
    replace_text(
        out, page.render(name=run.resolve().name, method=method, iterations=iterations, number=number, texts=texts)
    )
    return out
