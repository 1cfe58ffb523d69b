"""How a run keeps the trees of an iteration."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from flowgrpo.training.kept_trees import KeptTree
from flowgrpo.training.loop import Loop


def keep_trees(loop: Loop, parts: Sequence[KeptTree]) -> None:
    """Write the trees of an iteration that is due to a run's folder, in the background, from the parts of all processes."""
    asked = loop.config.run.trees
    if asked is None or not asked.due(loop.done, loop.config.train.iterations):
        return
    everyone = loop.exchange.gather_shares(list(parts))
    if loop.accelerator.is_main_process:
        loop.background.submit(partial(loop.trees.write, everyone))
