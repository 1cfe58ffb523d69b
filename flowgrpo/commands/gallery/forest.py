"""Where the nodes of a kept tree stand on a page, and what can be said of it: columns are steps, rows are ends."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from flowgrpo.training.reports.tree_store import KeptNode, KeptTree


@dataclass(frozen=True)
class Rise:
    """How the reward of what is shown changed along one step of a path."""

    node: int
    before: float
    after: float


@dataclass(frozen=True)
class Spread:
    """What the noise of one step decided: how far the rewards of siblings lie from their parent's mean.

    Attributes:
        step: of the schedule, that the siblings were drawn in.
        deviation: standard deviation among siblings, pooled over their parents.
        parents: with several children that could be measured.
    """

    step: int
    deviation: float
    parents: int


@dataclass(frozen=True)
class Forest:
    """The trees of one prompt in one iteration, laid out.

    Attributes:
        tree: as it was kept.
    """

    tree: KeptTree

    @property
    def nodes(self) -> Sequence[KeptNode]:
        """Of the tree, parents before children."""
        return self.tree.nodes

    @cached_property
    def children(self) -> list[list[int]]:
        """Of each node."""
        found: list[list[int]] = [[] for _ in self.nodes]
        for place, node in enumerate(self.nodes):
            if node.parent is not None:
                found[node.parent].append(place)
        return found

    @cached_property
    def rows(self) -> list[float]:
        """Of each node: ends have whole numbers from the top, a parent stands in the middle of its children."""
        rows = [0.0] * len(self.nodes)
        ends = 0
        order: list[int] = []
        waiting = [place for place, node in enumerate(self.nodes) if node.parent is None][::-1]
        while waiting:
            place = waiting.pop()
            order.append(place)
            waiting += self.children[place][::-1]
        for place in order:
            if not self.children[place]:
                rows[place] = float(ends)
                ends += 1
        for place in reversed(order):
            if self.children[place]:
                rows[place] = statistics.mean(
                    rows[child] for child in (self.children[place][0], self.children[place][-1])
                )
        return rows

    @cached_property
    def ends(self) -> dict[int, float]:
        """The ends of trajectories whose reward is known, with it; twigs are none."""
        return {
            place: node.total
            for place, node in enumerate(self.nodes)
            if not self.children[place] and not node.estimated and not node.twig and node.total is not None
        }

    @cached_property
    def values(self) -> list[float | None]:
        """Of each node: the mean reward of the ends beyond it, its own of an end; twigs count for nothing but themselves."""
        sums = [0.0] * len(self.nodes)
        counts = [0] * len(self.nodes)
        for place in range(len(self.nodes) - 1, -1, -1):
            node = self.nodes[place]
            if not self.children[place] and not node.estimated and node.total is not None:
                sums[place], counts[place] = node.total, 1
            if node.parent is not None and not node.twig:
                sums[node.parent] += sums[place]
                counts[node.parent] += counts[place]
        return [total / count if count else None for total, count in zip(sums, counts, strict=True)]

    @cached_property
    def ode_values(self) -> list[float | None]:
        """Of each node: the reward of the sample that steps without noise lead to from it, by a twig where there is one."""
        found: list[float | None] = [None] * len(self.nodes)
        by_twig = [False] * len(self.nodes)
        for place in range(len(self.nodes) - 1, -1, -1):
            node = self.nodes[place]
            if not self.children[place] and not node.estimated:
                found[place] = node.total
            if node.parent is None or node.noise > 0 or found[place] is None or by_twig[node.parent]:
                continue
            found[node.parent], by_twig[node.parent] = found[place], node.twig
        return found

    @cached_property
    def mates(self) -> Counter[tuple[int, ...]]:
        """How many units each comparison set has."""
        units = {(node.compared, node.unit) for node in self.nodes if node.unit is not None}
        return Counter(compared for compared, _ in units)

    @cached_property
    def bounds(self) -> tuple[float, float]:
        """The smallest and the largest reward of all that is shown."""
        known = [node.total for node in self.nodes if node.total is not None]
        return (min(known), max(known)) if known else (0.0, 0.0)

    @cached_property
    def largest_advantage(self) -> float:
        """The largest absolute advantage of its edges."""
        return max((abs(node.advantage) for node in self.nodes if node.advantage is not None), default=0.0)

    @cached_property
    def best(self) -> int | None:
        """The end with the largest reward."""
        return max(self.ends, key=self.ends.__getitem__, default=None)

    def path(self, place: int) -> list[int]:
        """The nodes from the root to one, which is among them."""
        found: list[int] = []
        at: int | None = place
        while at is not None:
            found.append(at)
            at = self.nodes[at].parent
        return found[::-1]

    def rises(self, place: int) -> list[Rise]:
        """How the reward of what is shown changed on the way to a node; steps that were not scored are passed over."""
        scored = [(each, total) for each in self.path(place) if (total := self.nodes[each].total) is not None]
        return [Rise(node, before, after) for (_, before), (node, after) in pairwise(scored)]

    def largest_rise(self, place: int) -> Rise | None:
        """The step on the way to a node at which the reward rose most; None where it never did."""
        rise = max(self.rises(place), key=lambda rise: rise.after - rise.before, default=None)
        return rise if rise is not None and rise.after > rise.before else None

    @cached_property
    def spreads(self) -> list[Spread]:
        """Of each step in which some state has several children that lead to known rewards."""
        squares: dict[int, list[tuple[float, int]]] = defaultdict(list)
        for place, node in enumerate(self.nodes):
            drawn = [child for child in self.children[place] if self.nodes[child].noise > 0]
            siblings = [value for child in drawn if (value := self.values[child]) is not None]
            if len(siblings) > 1:
                squares[node.step].append((statistics.variance(siblings), len(siblings) - 1))
        return [
            Spread(step, (sum(v * n for v, n in own) / sum(n for _, n in own)) ** 0.5, len(own))
            for step, own in sorted(squares.items())
        ]
