"""Lockstep for FSDP: processes call sharded networks in the same order, however unequal their work is.

Each call of a sharded network gathers its weights from all processes. So all processes must make the same calls: of the
same network, with or without gradient, and with as many backward passes. Rollouts of trees, texts that end early and
uneven evaluations break this rule. Therefore, before each call, all processes exchange numbers for the calls that they
wish to make, and the highest wish is granted. A process with another wish, or with none, stands in: it makes the granted
call with one row and drops the result. Then it wishes again.

The arguments of a stand-in call do not matter, since only weights travel, never activations. If the sharded weights are
trained, a stand-in for a reference call swaps in its own reference shards. In a backward pass it sends gradients of 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, cast

import torch
from torch import distributed
from torch.utils._pytree import tree_leaves, tree_map_only

from flowgrpo.errors import InputError

# Wishes, of which the highest is granted. From CALL up there is one number for each network: first for calls with
# gradient, then for calls without, then for calls of the reference. So a process with a reference call stands in only
# for other reference calls.
REST, BACKWARD, CALL = 0, 1, 2
WITH_GRADIENT, WITHOUT, OF_REFERENCE = 0, 1, 2
_STANDING_IN: ContextVar[bool] = ContextVar("standing_in", default=False)


def stands_in() -> bool:
    """Return whether the current call is a stand-in. Such a call must not be counted or trigger hooks."""
    return _STANDING_IN.get()


class Lockstep:
    """The lockstep of processes that share sharded networks. Without networks it does nothing.

    At first every process calls each network once inside `meeting`. Stand-ins repeat that call. `as_reference` returns
    a context that swaps in the reference's weights; it is None if the networks are frozen.
    """

    def __init__(
        self,
        networks: Sequence[torch.nn.Module] = (),
        as_reference: Callable[[], AbstractContextManager[None]] | None = None,
    ):
        self._networks, self._as_reference = list(networks), as_reference
        self._in_reference = False
        self._calls: dict[int, tuple[Any, Any, Any]] = {}  # arguments and autocast of stand-ins
        self._meeting = False
        self._thrown_away: list[torch.Tensor] = []  # results of stand-ins, for the next backward pass
        if self._networks:
            # A host group, so that a GPU need not wait. All processes are members.
            self._group = cast("distributed.ProcessGroup", distributed.new_group(backend="gloo"))
            for network in self._networks:
                network.register_forward_pre_hook(self._before_call, with_kwargs=True, prepend=True)

    @property
    def active(self) -> bool:
        """Whether there are sharded networks."""
        return bool(self._networks)

    @contextmanager
    def meeting(self) -> Iterator[None]:
        """Record the calls inside this context, equal on all processes; raise InputError if a network is not called."""
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
        """Mark that the networks hold the reference's weights inside this context."""
        self._in_reference = True
        try:
            yield
        finally:
            self._in_reference = False

    def backward(self, loss: torch.Tensor) -> None:
        """Run the backward pass of a loss, as soon as no process wishes to call a network."""
        if self.active:
            self._take_turn(BACKWARD)
        self._send(loss)

    def join(self) -> None:
        """Make stand-in calls until no process wishes a call or a backward pass. Call this before any other collective."""
        if self.active:
            self._take_turn(REST)

    def _before_call(self, network: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if stands_in():
            return
        index = next(i for i, each in enumerate(self._networks) if each is network)
        if self._meeting:
            self._calls[index] = (*tree_map_only(torch.Tensor, _copy, (args, kwargs)), _autocast(_device(network)))
        of_reference = self._as_reference is not None and self._in_reference
        kind = WITH_GRADIENT if torch.is_grad_enabled() else OF_REFERENCE if of_reference else WITHOUT
        self._take_turn(CALL + kind * len(self._networks) + index)

    def _take_turn(self, wish: int) -> None:
        """Make the calls that other processes wish for until this process's own wish is granted."""
        while True:
            granted = torch.tensor(wish)
            distributed.all_reduce(granted, distributed.ReduceOp.MAX, group=self._group)
            if granted == wish:
                return
            self._stand_in(int(granted))

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
                # No cache: this process's own autocast may hold casts of other weights.
                torch.autocast(_device(network), dtype=dtype, enabled=dtype is not None, cache_enabled=False),
            ):
                out = self._call(kind, network, args, kwargs)
        finally:
            _STANDING_IN.reset(token)
        if kind == WITH_GRADIENT:
            learning = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor) and x.requires_grad]
            if not learning:
                raise RuntimeError("a process that stood in for a call with gradient has none to send backward")
            self._thrown_away += learning

    def _call(self, kind: int, network: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._as_reference is not None:
            # This process may be in its own reference already, for a call of another network.
            in_place = kind != OF_REFERENCE or self._in_reference
            with nullcontext() if in_place else self._as_reference():
                return network(*args, **kwargs)
        trained = (p for p in network.named_parameters() if p[1].requires_grad) if kind == WITH_GRADIENT else ()
        copies = {name: p.detach().requires_grad_() for name, p in trained}  # adapters must get no gradient
        return torch.func.functional_call(network, copies, args, kwargs)

    def _send(self, *losses: torch.Tensor) -> None:
        """Run one backward pass: of the loss, if given, and of the results of stand-ins with gradient 0."""
        thrown_away, self._thrown_away = self._thrown_away, []
        gradients = [*(torch.ones_like(x) for x in losses), *(torch.zeros_like(x) for x in thrown_away)]
        torch.autograd.backward([*losses, *thrown_away], gradients)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()


def _device(network: torch.nn.Module) -> str:
    return next(network.parameters()).device.type


def _autocast(device: str) -> torch.dtype | None:
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
