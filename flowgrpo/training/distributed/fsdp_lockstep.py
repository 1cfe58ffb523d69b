"""Processes that share the weights of a network call it in lock-step, whatever each of them has to compute.

A call of a network in shards gathers its weights from all processes, so that all must make the same calls in the same
order: of which network, with gradient or without, and as many backward passes. A rollout of trees, a text that ends early or
a last part of an evaluation does not. So the processes say before each call what they wish; one wish is granted, and who has
another one, or none, stands in: it makes a call of one row that is thrown away. Where wishes differ, processes wait for each
other.

Which call it is makes no difference to the collective: only weights travel, never activations. Where the weights in shards
are those that learn, a call of the reference needs the reference's shards of every process, and a backward pass sums
gradients: who stands in puts its own shards in place, and sends gradients of 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, cast

import torch
from torch import distributed
from torch.utils._pytree import tree_leaves, tree_map

from flowgrpo.errors import InputError

# Wishes; the highest is granted. Calls with gradient are from CALL up, a number for each network, those without above them,
# those of the reference on top: a process that computes its reference stands in for calls of the reference alone.
REST, BACKWARD, CALL = 0, 1, 2
WITH_GRADIENT, WITHOUT, OF_REFERENCE = 0, 1, 2
_STANDING_IN: ContextVar[bool] = ContextVar("standing_in", default=False)


def stands_in() -> bool:
    """Whether the call of a network that is under way is thrown away: it is not counted, and sees no hook of another's."""
    return _STANDING_IN.get()


class Lockstep:
    """The turns of processes that hold networks in shards; without networks each process goes its own way.

    Before they part, every process calls each network once in `meeting`: a call like that is made when it stands in.

    Args:
        networks: in shards, in an order that is the same on every process.
        as_reference: context with the reference's weights in place, where the networks learn; None where they are frozen.
    """

    def __init__(
        self,
        networks: Sequence[torch.nn.Module] = (),
        as_reference: Callable[[], AbstractContextManager[None]] | None = None,
    ):
        self._networks, self._as_reference = list(networks), as_reference
        self._in_reference = False
        self._calls: dict[int, tuple[Any, Any, Any]] = {}  # arguments and autocast of each network's call when they met
        self._meeting = False
        self._thrown_away: list[torch.Tensor] = []  # results of stand-ins that wait for a backward pass
        if self._networks:
            # Wishes meet on the host, and a GPU computes on; all are members.
            self._group = cast("distributed.ProcessGroup", distributed.new_group(backend="gloo"))
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

    @contextmanager
    def reference(self) -> Iterator[None]:
        """To be entered where the weights of the networks were exchanged for those of the reference."""
        self._in_reference = True
        try:
            yield
        finally:
            self._in_reference = False

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
            self._calls[index] = (*tree_map(_kept, (args, kwargs)), _autocast(_device(network)))
        other = self._as_reference is not None and self._in_reference
        kind = WITH_GRADIENT if torch.is_grad_enabled() else OF_REFERENCE if other else WITHOUT
        self._take_turn(CALL + kind * len(self._networks) + index)

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
        kind, index = divmod(granted - CALL, len(self._networks))
        network, (args, kwargs, dtype) = self._networks[index], self._calls[index]
        token = _STANDING_IN.set(True)
        try:
            with (
                torch.set_grad_enabled(kind == WITH_GRADIENT),
                # What is cast here is not what this process's own call casts, under the autocast that it may be in.
                torch.autocast(_device(network), dtype=dtype, enabled=dtype is not None, cache_enabled=False),
            ):
                out = self._thrown_away_call(kind, network, args, kwargs)
        finally:
            _STANDING_IN.reset(token)
        if kind == WITH_GRADIENT:
            learning = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor) and x.requires_grad]
            if not learning:
                raise RuntimeError("a process that stood in for a call with gradient has none to send backward")
            self._thrown_away += learning

    def _thrown_away_call(
        self, kind: int, network: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self._as_reference is not None:
            exchanged = kind != OF_REFERENCE or self._in_reference  # of another network than this process asks
            with nullcontext() if exchanged else self._as_reference():
                return network(*args, **kwargs)
        trained = (p for p in network.named_parameters() if p[1].requires_grad) if kind == WITH_GRADIENT else ()
        copies = {name: p.detach().requires_grad_() for name, p in trained}  # so that no gradient stays
        return torch.func.functional_call(network, copies, args, kwargs)

    def _send(self, *losses: torch.Tensor) -> None:
        """One backward pass of a loss, if there is one, and of what was thrown away, with a gradient of 0."""
        thrown_away, self._thrown_away = self._thrown_away, []
        gradients = [*(torch.ones_like(x) for x in losses), *(torch.zeros_like(x) for x in thrown_away)]
        torch.autograd.backward([*losses, *thrown_away], gradients)


def _kept(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _device(network: torch.nn.Module) -> str:
    return next(network.parameters()).device.type


def _autocast(device: str) -> torch.dtype | None:
    """The type in which matrices are multiplied here; None without autocast."""
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
