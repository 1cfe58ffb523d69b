import pytest
import torch

from flowgrpo.credit import terminal
from flowgrpo.errors import InputError
from samplers.kernels import Kernel
from samplers.plans import chain
from samplers.trees import Move, Root, grow

SIGMAS = (1.0, 0.75, 0.5, 0.0)
SDE = Kernel("dance_sde", 0.3)


def tree(plan, groups=2, size=3):
    roots = [Root(10 + g, i, None) for g in range(groups) for i in range(size)]
    start = (torch.zeros(len(roots), 2),)
    return grow(plan, SIGMAS, roots, start, lambda x, sigma, rows: x, lambda shape, *address: torch.ones(shape), 4)


def test_every_edge_of_a_chain_belongs_to_its_own_end():
    grown = tree(chain([SDE] * 3, (0, 1), (0, 1)))
    rewards = torch.arange(6, dtype=torch.float64).reshape(6, 1)
    units = terminal(grown, rewards)
    assert units.values[:, 0].tolist() == [0, 1, 2, 3, 4, 5]
    for node, of in enumerate(units.of_edge.tolist()):
        if grown.nodes[node].parent is None:
            assert of == -1
        else:
            leaf = grown.nodes[grown.leaves[of]]
            assert leaf.root == grown.nodes[node].root
    assert sorted(units.of_edge[units.of_edge >= 0].tolist()) == sorted(list(range(6)) * 3)


def test_a_tree_that_branches_is_refused():
    grown = tree(lambda role, step: (Move(SDE, count=2),) if step == 1 else (Move(SDE),))
    with pytest.raises(InputError, match="share no edge"):
        terminal(grown, torch.zeros(len(grown.leaves), 1, dtype=torch.float64))
