"""Counter of the model evaluations that a gradient goes back through."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from flowgrpo.training.distributed.fsdp_lockstep import stands_in


class BackwardCounter:
    """The number of rows of networks' calls whose backward pass has run, in `count`.

    A call counts when the gradient reaches its output, so a graph that is kept from a rollout counts in the update, and a
    graph that is thrown away never does.
    """

    def __init__(self, networks: Iterable[torch.nn.Module]):
        self.count = 0
        for network in networks:
            network.register_forward_hook(self._watch, with_kwargs=True)

    def _watch(self, network: torch.nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        learns = next((x for x in _tensors(output) if x.requires_grad), None)
        if learns is None or stands_in():
            return
        waiting = [len(next(x for x in (*args, *kwargs.values()) if isinstance(x, (torch.Tensor, list))))]

        def add(gradient: torch.Tensor) -> None:
            while waiting:  # once, if several losses share the graph
                self.count += waiting.pop()

        learns.register_hook(add)


def _tensors(output: Any) -> Iterable[torch.Tensor]:
    """Return the tensors at the top of a network's output."""
    if isinstance(output, torch.Tensor):
        return [output]
    if isinstance(output, (tuple, list)):
        values = output
    else:
        values = output.values() if isinstance(output, Mapping) else vars(output).values()
    return [value for value in values if isinstance(value, torch.Tensor)]
