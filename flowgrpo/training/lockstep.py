"""Processes that share the weights of a network call it in lock-step, whatever each of them has to compute.

A call of a network in shards gathers its weights from all processes, so that all must make the same calls in the same
order: of which network, with gradient or without, and as many backward passes. A rollout of trees, a text that ends early or
a last part of an evaluation does not. So the processes say before each call what they wish; one wish is granted, and who has
another one, or none, stands in: it makes a call that is thrown away. Time is not lost by it, for that process would wait.

Which call it is makes no difference to the collective: only weights travel, never activations.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import distributed
from torch.utils._pytree import tree_leaves, tree_map

IDLE, BACKWARD, CALL = 0, 1, 2  # wishes; a call's is CALL and up
_STANDING_IN: ContextVar[bool] = ContextVar("standing_in", default=False)


def stands_in() -> bool:
    """Whether the call of a network that is under way is thrown away, so that it is not to be counted."""
    return _STANDING_IN.get()


class Lockstep:
    """The turns of processes that hold networks in shards; without networks each process goes its own way.

    Every process must have called each network once before they part (see `Loop.run`): that call is the one that is made
    when it stands in.

    Args:
        networks: in shards, in an order that is the same on every process.
        parameters: the trained tensors, which a backward pass that is thrown away leaves as they are.
    """

    def __init__(self, networks: Sequence[torch.nn.Module] = (), parameters: Sequence[torch.nn.Parameter] = ()):
        self._networks, self._parameters = list(networks), list(parameters)
        self._calls: dict[int, tuple[Any, Any]] = {}  # arguments of each network's first call
        self._thrown_away: list[torch.Tensor] = []  # results of stand-ins that wait for a backward pass
        if self._networks:
            self._group = distributed.new_group(backend="gloo")  # of its own: a GPU need not wait for it
            for network in self._networks:
                network.register_forward_pre_hook(self._before, with_kwargs=True, prepend=True)

    @property
    def active(self) -> bool:
        """Whether there are networks in shards."""
        return bool(self._networks)

    def backward(self, loss: torch.Tensor) -> None:
        """Send a loss backward, when all processes have one or nothing left to call."""
        if self.active:
            self._take_turn(BACKWARD)
        self._send(loss)

    def join(self) -> None:
        """Wait until no process calls a network any more; to be called before processes meet in another way."""
        if self.active:
            self._take_turn(IDLE)

    def _before(self, network: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if stands_in():
            return
        index = next(i for i, each in enumerate(self._networks) if each is network)
        if index not in self._calls:
            self._calls[index] = tree_map(_kept, (args, kwargs))
        self._take_turn(CALL + 2 * index + torch.is_grad_enabled())

    def _take_turn(self, wish: int) -> None:
        """Stand in for the others until this process's wish is granted."""
        while (granted := self._granted(wish)) != wish:
            self._stand_in(granted)

    def _granted(self, wish: int) -> int:
        """The wish that all processes follow: a call before a backward pass, and either before rest."""
        wishes = [torch.zeros((), dtype=torch.long) for _ in range(distributed.get_world_size(self._group))]
        distributed.all_gather(wishes, torch.tensor(wish), group=self._group)
        found = [int(each) for each in wishes]
        return min((each for each in found if each >= CALL), default=max(found))

    def _stand_in(self, granted: int) -> None:
        token = _STANDING_IN.set(True)
        try:
            if granted == BACKWARD:
                self._send(None)
                return
            index, learns = divmod(granted - CALL, 2)
            args, kwargs = self._calls[index]
            with torch.set_grad_enabled(bool(learns)):
                out = self._networks[index](*args, **kwargs)
            if learns:
                self._thrown_away += [x for x in tree_leaves(out) if isinstance(x, torch.Tensor) and x.requires_grad]
        finally:
            _STANDING_IN.reset(token)

    def _send(self, loss: torch.Tensor | None) -> None:
        """One backward pass of a loss, if there is one, and of what was thrown away, with a gradient of 0."""
        thrown_away, self._thrown_away = self._thrown_away, []
        without = [p for p in self._parameters if p.grad is None] if loss is None else []
        losses = [] if loss is None else [loss]
        gradients = [*(torch.ones_like(x) for x in losses), *(torch.zeros_like(x) for x in thrown_away)]
        torch.autograd.backward([*losses, *thrown_away], gradients)
        for p in without:
            p.grad = None


def _kept(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
