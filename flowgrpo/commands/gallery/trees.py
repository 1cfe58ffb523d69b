"""The page of trees: how they grew, which branch earned what, and what the update was told of each edge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

from flowgrpo.commands.gallery.forest import Forest
from flowgrpo.commands.gallery.numbers import difference, number, share
from flowgrpo.commands.gallery.pages import template
from flowgrpo.data.yaml_maps import read_map
from flowgrpo.errors import InputError
from flowgrpo.training.reports.tree_store import KeptNode, TreeFolder
from flowgrpo.training.run.run_folder import check_writable, replace_text

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
        level: how deep in its tree, from 1.
        picture: WebP in base64; None without one.
        bar: how long the bar of its reward is, in percent; None without one.
        label: what a reader without eyes for it is told.
    """

    place: int
    x: float
    y: float
    _: KW_ONLY
    level: int
    picture: str | None
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

    @property
    def tile(self) -> tuple[float, float]:
        """Width and height of a picture on the page."""
        width, height = self.forest.tree.size
        scale = SIDE / max(width, height)
        return width * scale, height * scale

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
        found = []
        for place, node in enumerate(self.forest.nodes):
            what = "sample" if not node.estimated else "canvas" if self.texts else "foretold"
            earned = "" if node.advantage is None else f", advantage {number(node.advantage)}"
            spot = Spot(
                place,
                self.x(node.step),
                self.y(place),
                level=len(self.forest.path(place)),
                picture=node.picture,
                bar=share(node.total, *self.forest.bounds),
                label=f"step {node.step}, {what}, reward {number(node.total)}{earned}",
                kind=f"{what}{' twig' if node.twig else ''}{'' if node.picture else ' unseen'}",
            )
            found.append(spot)
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
        """What the page tells of each node that is asked for, and what of the way to it, in words."""
        found = []
        for place, node in enumerate(self.forest.nodes):
            way, most = self.forest.rises(place), self.forest.largest_rise(place)
            steps = [f"step {self.forest.nodes[rise.node].step}" for rise in way]
            told = {
                "parent": node.parent,
                "step": node.step,
                "row": self.forest.rows[place],
                "text": node.text,
                "facts": self._facts(place, node),
                "most": None if most is None else most.node,
                "way": [
                    [rise.node, step, number(rise.after), difference(rise.before, rise.after)]
                    for rise, step in zip(way, steps, strict=True)
                ],
            }
            found.append(told)
        return found

    def _facts(self, place: int, node: KeptNode) -> list[tuple[str, str]]:
        forest = self.forest
        level = f"{node.sigma:.0%} masked" if self.texts else f"σ {node.sigma:.3f}"
        facts = [("step", f"{node.step} of {len(forest.tree.sigmas) - 1}, {level}")]
        if node.seed is not None:
            facts.append(("starts from", f"seed {node.seed}"))
        if node.total is not None:
            facts.append(("reward, foretold" if node.estimated else "reward", number(node.total)))
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
        facts.append(("compared", f"unit {node.unit} with {others} other{'s' if others != 1 else ''}"))
        facts.append(("weight in the loss", number(node.weight) if node.updated else "not trained on"))
        return facts

    @property
    def sentence(self) -> str:
        """What a look at the tree tells first."""
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
            f"{words} On its way the reward of what the model foretells rose most in step {step}: "
            f"{number(rise.before)} → {number(rise.after)} ({difference(rise.before, rise.after)})."
        )


def _kind(node: KeptNode) -> str:
    """The class of an edge."""
    if not node.trained:
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

    The first and the last are among them, however large they are.
    """
    steps = sorted(sizes)
    most = len(steps) if not sizes else min(len(steps), LARGEST // max(1, min(sizes.values())))
    for count in range(most, 2, -1):
        chosen = {steps[round(i * (len(steps) - 1) / (count - 1))] for i in range(count)}
        if sum(sizes[step] for step in chosen) <= LARGEST:
            return chosen
    return {steps[0], steps[-1]} if steps else set()


def check_trees(run: Path) -> None:
    """Refuse a run of which the page of trees cannot be written.

    Raises:
        InputError: a file that the page shows is damaged.
    """
    folder = TreeFolder(run)
    for step in shown_steps(folder.sizes()):
        folder.read([step])


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
            f"{run}: it kept no trees; train with run.trees={{every: 8}}, and it keeps those of every 8th iteration, unless "
            "run.engine or data.groups make the samples of a flow model"
        )
    check_writable(out.parent, str(out))
    by_step: dict[int, list[Drawing]] = {}
    for tree in kept:
        by_step.setdefault(tree.step, []).append(Drawing(Forest(tree)))
    iterations = [Iteration(step, drawings) for step, drawings in sorted(by_step.items())]
    config = read_map(run / "config.yaml") if (run / "config.yaml").is_file() else {}
    algorithm = config.get("algorithm")
    asked = {
        "name": run.resolve().name,
        "method": algorithm.get("preset") if isinstance(algorithm, dict) else None,
        "iterations": iterations,
        "texts": iterations[0].drawings[0].texts,
        "number": number,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    replace_text(out, template("trees.html.jinja").render(asked))
    return out
