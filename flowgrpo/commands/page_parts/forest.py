"""Layout and statistics of a kept tree; on the page a column is a step and a row ends in a sample."""

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
    """Change of the shown reward along the edge to a node."""

    node: int
    before: float
    after: float


@dataclass(frozen=True)
class Spread:
    """Standard deviation of siblings' rewards after a step, pooled over `parents` states with several scored children."""

    step: int
    deviation: float
    parents: int


@dataclass(frozen=True)
class Forest:
    """The trees of one prompt in one iteration; `children`, `rows`, `values` and `ode_values` have an entry per node."""

    tree: KeptTree

    @property
    def nodes(self) -> Sequence[KeptNode]:
        """Nodes, parents before children."""
        return self.tree.nodes

    @cached_property
    def children(self) -> list[list[int]]:
        """Children of each node."""
        children: list[list[int]] = [[] for _ in self.nodes]
        for place, node in enumerate(self.nodes):
            if node.parent is not None:
                children[node.parent].append(place)
        return children

    @cached_property
    def rows(self) -> list[float]:
        """Row of each node: ends have whole numbers from the top, a parent stands in the middle of its children."""
        rows = [0.0] * len(self.nodes)
        ends = 0
        order: list[int] = []
        waiting = [place for place, node in enumerate(self.nodes) if node.parent is None][::-1]
        while waiting:
            place = waiting.pop()
            order.append(place)
            waiting += self.children[place][::-1]
            if not self.children[place]:
                rows[place] = float(ends)
                ends += 1
        for place in reversed(order):
            if children := self.children[place]:
                rows[place] = statistics.mean((rows[children[0]], rows[children[-1]]))
        return rows

    @cached_property
    def ends(self) -> dict[int, float]:
        """Known rewards of the ends of trajectories, by node index; twigs and one-step predictions are left out."""
        return {
            place: node.total
            for place, node in enumerate(self.nodes)
            if not self.children[place] and not node.estimated and not node.twig and node.total is not None
        }

    @cached_property
    def values(self) -> list[float | None]:
        """Mean reward of the ends below each node; an end has its own reward. Twigs do not count for their parents."""
        sums = [0.0] * len(self.nodes)
        counts = [0] * len(self.nodes)
        for place, node in reversed([*enumerate(self.nodes)]):
            if not self.children[place] and not node.estimated and node.total is not None:
                sums[place], counts[place] = node.total, 1
            if node.parent is not None and not node.twig:
                sums[node.parent] += sums[place]
                counts[node.parent] += counts[place]
        return [total / count if count else None for total, count in zip(sums, counts, strict=True)]

    @cached_property
    def ode_values(self) -> list[float | None]:
        """Reward of the sample that ODE steps reach from each node, along a twig where there is one."""
        values: list[float | None] = [None] * len(self.nodes)
        by_twig = [False] * len(self.nodes)
        for place, node in reversed([*enumerate(self.nodes)]):
            if not self.children[place] and not node.estimated:
                values[place] = node.total
            if node.parent is None or node.noise > 0 or values[place] is None or by_twig[node.parent]:
                continue
            values[node.parent], by_twig[node.parent] = values[place], node.twig
        return values

    @cached_property
    def mates(self) -> Counter[tuple[int, ...]]:
        """Number of credit units in each comparison set."""
        units = {(node.compared, node.unit) for node in self.nodes if node.unit is not None}
        return Counter(compared for compared, _ in units)

    @cached_property
    def bounds(self) -> tuple[float, float]:
        """Smallest and largest shown reward."""
        known = [node.total for node in self.nodes if node.total is not None]
        return (min(known), max(known)) if known else (0.0, 0.0)

    @cached_property
    def largest_advantage(self) -> float:
        """Largest absolute advantage of an edge."""
        return max((abs(node.advantage) for node in self.nodes if node.advantage is not None), default=0.0)

    @cached_property
    def best(self) -> int | None:
        """End with the largest reward."""
        return max(self.ends, key=self.ends.__getitem__, default=None)

    def path(self, place: int) -> list[int]:
        """Return the nodes from the root to a node, both included."""
        path: list[int] = []
        at: int | None = place
        while at is not None:
            path.append(at)
            at = self.nodes[at].parent
        return path[::-1]

    def rises(self, place: int) -> list[Rise]:
        """Return the changes of the shown reward on the path to a node, without nodes that have none."""
        scored = [(each, total) for each in self.path(place) if (total := self.nodes[each].total) is not None]
        return [Rise(node, before, after) for (_, before), (node, after) in pairwise(scored)]

    def largest_rise(self, place: int) -> Rise | None:
        """Return the largest rise on the path to a node; None if the reward never rose."""
        rise = max(self.rises(place), key=lambda rise: rise.after - rise.before, default=None)
        return rise if rise is not None and rise.after > rise.before else None

    @cached_property
    def spreads(self) -> list[Spread]:
        """Spread of each step that gave some state several noisy children with known rewards."""
        variances: dict[int, list[tuple[float, int]]] = defaultdict(list)
        for place, node in enumerate(self.nodes):
            drawn = [child for child in self.children[place] if self.nodes[child].noise > 0]
            siblings = [value for child in drawn if (value := self.values[child]) is not None]
            if len(siblings) > 1:
                variances[node.step].append((statistics.variance(siblings), len(siblings) - 1))
        return [
            Spread(step, (sum(v * n for v, n in parents) / sum(n for _, n in parents)) ** 0.5, len(parents))
            for step, parents in sorted(variances.items())
        ]
