"""A small tree as a run keeps it: a brush of three branches, one of them pruned, and a twig."""

import numpy as np

from flowgrpo.training.kept_trees import KeptNode, KeptTree, TreeFolder, encoded

SIGMAS = (1.0, 0.8, 0.4, 0.0)


def shade(grey):
    return encoded(np.full((6, 6, 4), [grey, grey, grey, 255], dtype=np.uint8))


def node(parent, step, total=None, **fields):
    drawn = {"kernel": "flow_sde 0.7", "noise": 0.3, "trained": True, "updated": True} if "advantage" in fields else {}
    rewards = () if total is None else (total,)
    usual = {"estimated": step < 3, "rewards": rewards, "total": total, **drawn}
    return KeptNode(parent=parent, step=step, sigma=SIGMAS[step], **{**usual, **fields})


FIRST = (0, 1)  # a comparison set
NODES = (
    node(None, 0, 0.0, seed=5, picture=shade(40)),  # 0
    node(0, 1, 0.1, advantage=1.0, unit=0, compared=FIRST, picture=shade(80), weight=1.0, log_prob=-1.25),  # 1
    node(0, 1, 0.2, advantage=-0.5, unit=1, compared=FIRST, picture=shade(120), weight=1.0),  # 2
    node(0, 1, 0.2, advantage=-0.5, unit=2, compared=FIRST, updated=False),  # 3, pruned
    node(1, 2, 0.7, kernel="ode"),  # 4
    node(4, 3, 0.9, kernel="ode", picture=shade(160)),  # 5
    node(2, 3, 0.3, kernel="ode"),  # 6
    node(3, 3, 0.3, kernel="ode"),  # 7
    node(0, 3, 0.6, kernel="ode", twig=True),  # 8
)


def tree(nodes=NODES, **fields):
    usual = {"step": 1, "group": 0, "prompt": "a cat", "sigmas": SIGMAS, "names": ("mine",), "size": (6, 6)}
    return KeptTree(**{**usual, **fields}, nodes=tuple(nodes))


def run_with(folder, *trees):
    for each in trees:
        TreeFolder(folder).write([each])
    return folder
