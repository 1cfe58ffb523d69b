"""Processes that share the weights of a network call it in lock-step, whatever each of them has to compute.

A call of a network in shards gathers its weights from all processes, so that all must make the same calls in the same
order: of which network, with gradient or without, and as many backward passes. A rollout of trees, a text that ends early or
a last part of an evaluation does not. So the processes say before each call what they wish; one wish is granted, and who has
another one, or none, stands in: it makes a call of one row that is thrown away. Where wishes differ, processes wait for each
other.

Which call it is makes no difference to the collective: only weights travel, never activations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import distributed
from torch.utils._pytree import tree_leaves, tree_map

from flowgrpo.errors import InputError

# Wishes; the highest is granted. Calls with gradient are from CALL up, a number for each network, and those without above
# them: a process that computes its reference is done with it before it stands in for a call with gradient.
REST, BACKWARD, CALL = 0, 1, 2
_STANDING_IN: ContextVar[bool] = ContextVar("standing_in", default=False)


def stands_in() -> bool:
    """Whether the call of a network that is under way is thrown away: it is not counted, and sees no hook of another's."""
    return _STANDING_IN.get()


class Lockstep:
    """The turns of processes that hold networks in shards; without networks each process goes its own way.

    Before they part, every process calls each network once in `meeting`: a call like that is made when it stands in.

    Args:
        networks: in shards, in an order that is the same on every process.
    """

    def __init__(self, networks: Sequence[torch.nn.Module] = ()):
        self._networks = list(networks)
        self._calls: dict[int, tuple[Any, Any]] = {}  # arguments of each network's call when they met
        self._meeting = False
        self._thrown_away: list[torch.Tensor] = []  # results of stand-ins that wait for a backward pass
        if self._networks:
            self._group = distributed.new_group(backend="gloo")  # wishes meet on the host, and a GPU computes on
            for network in self._networks:
                network.register_forward_pre_hook(self._before, with_kwargs=True, prepend=True)

    @property
    def active(self) -> bool:
        """Whether there are networks in shards."""
        return bool(self._networks)

    @contextmanager
    def meeting(self) -> Iterator[None]:
        """Keep the arguments of the calls inside this context, which all processes make alike.

        Raises:
            InputError: some network was not called.
        """
        self._meeting = True
        try:
            yield
        finally:
            self._meeting = False
        if len(self._calls) < len(self._networks):
            raise InputError(
                f"run.sharding: of the model's {len(self._networks)} networks the first and the last step call "
                f"{len(self._calls)}; set run.sharding=none"
            )

    def backward(self, loss: torch.Tensor) -> None:
        """Send a loss backward, when all processes have one or nothing left to call."""
        if self.active:
            self._take_turn(BACKWARD)
        self._send(loss)

    def join(self) -> None:
        """Wait until no process calls a network any more; to be called before processes meet in another way."""
        if self.active:
            self._take_turn(REST)

    def _before(self, network: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if stands_in():
            return
        index = next(i for i, each in enumerate(self._networks) if each is network)
        if self._meeting:
            self._calls[index] = tree_map(_kept, (args, kwargs))
        self._take_turn(CALL + index + (0 if torch.is_grad_enabled() else len(self._networks)))

    def _take_turn(self, wish: int) -> None:
        """Stand in for the others until this process's wish is granted."""
        while (granted := self._granted(wish)) != wish:
            self._stand_in(granted)

    def _granted(self, wish: int) -> int:
        """The wish that all processes follow."""
        highest = torch.tensor(wish)
        distributed.all_reduce(highest, distributed.ReduceOp.MAX, group=self._group)
        return int(highest)

    def _stand_in(self, granted: int) -> None:
        if granted == BACKWARD:
            self._send()
            return
        without, index = divmod(granted - CALL, len(self._networks))
        network, (args, kwargs) = self._networks[index], self._calls[index]
        token = _STANDING_IN.set(True)
        try:
            with torch.set_grad_enabled(not without):
                adapters = {
                    name: p.detach().requires_grad_() for name, p in network.named_parameters() if p.requires_grad
                }
                out = torch.func.functional_call(
                    network, {} if without else adapters, args, kwargs
                )  # no gradient stays
        finally:
            _STANDING_IN.reset(token)
        if not without:
            learning = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor) and x.requires_grad]
            if not learning:
                raise RuntimeError("a process that stood in for a call with gradient has none to send backward")
            self._thrown_away += learning

    def _send(self, *losses: torch.Tensor) -> None:
        """One backward pass of a loss, if there is one, and of what was thrown away, with a gradient of 0."""
        thrown_away, self._thrown_away = self._thrown_away, []
        gradients = [*(torch.ones_like(x) for x in losses), *(torch.zeros_like(x) for x in thrown_away)]
        torch.autograd.backward([*losses, *thrown_away], gradients)


def _kept(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
