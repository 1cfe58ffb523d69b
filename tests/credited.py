"""Small trees whose leaves have given rewards, and what their edges are worth."""

import math

import torch

from samplers.growth import grow
from samplers.kernels import Kernel
from samplers.trees import TWIG, Root

SIGMAS = (1.0, 0.75, 0.5, 0.0)
SDE = Kernel("dance_sde", 0.3)


def drawn(shape, group, path, step, component):
    """Draw numbers that differ from edge to edge."""
    return torch.tensor([math.sin(1 + 3 * sum(path) + 5 * step + 7 * len(path) + k) for k in range(shape[0])])


def tree(plan, groups=2, size=3):
    roots = [Root(10 + g, i, None) for g in range(groups) for i in range(size)]
    start = (torch.zeros(len(roots), 2),)
    return grow(plan, SIGMAS, roots, start, lambda x, sigma, rows: x, drawn, 4)


def column(values):
    return torch.tensor(values, dtype=torch.float64)[:, None]


def left_trunk(grown, leaf):
    """Return the step at which a leaf's way left the trunk by a twig, or the last step."""
    on_twig = [i for i in grown.ancestry(leaf) if grown.nodes[i].role == TWIG]
    return grown.nodes[grown.nodes[on_twig[-1]].parent].step if on_twig else len(SIGMAS) - 1


def valued(grown, values):
    """Return rewards that give the state of each start at step k the value values[start][k], the end last."""
    ends = [(grown.nodes[leaf].root, left_trunk(grown, leaf)) for leaf in grown.leaves]
    return column([values[root.index][min(step, len(values[root.index]) - 1)] for root, step in ends])


def by_path(grown, units, of):
    """Map the path and step of each edge's child to what is `of` its unit, for one start."""
    return {
        (node.path[1:], node.step): of[unit]
        for node, unit in zip(grown.nodes, units.of_edge.tolist(), strict=True)
        if unit >= 0
    }


def sets(units):
    return units.comparison.unique(dim=0, return_counts=True)[1].tolist()
