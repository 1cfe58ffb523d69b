"""A cache over the steps of one call of a pipeline: where the first block has hardly changed, the others are left out.

The blocks of a network add to what flows through them. As long as what the first one adds is about what it was at the last
step that computed them all, the others are taken to add what they added there (First Block Cache, of ParaAttention's code).
How it departs from that and from diffusers' `FirstBlockCacheConfig`:

 1. Each row decides for itself, and takes what it would take alone. There one number for the whole batch decides, so that a
    sample depends on its neighbours. The blocks are left out of a call when no row of it needs them.
 2. It needs no support of the network's class or of its pipeline: SD3's has none there. Calls of one step (guidance with a
    call for each branch) are told apart by their order.
 3. Where a network has several lists of blocks, the longest is cached and the others compute.

It changes velocities, so it is for samples that only a reward hangs on, and nothing is scored or trained through it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from flowgrpo.errors import InputError

Tensor = torch.Tensor
Outputs = tuple[Tensor | None, ...]  # what a block returns


@dataclass
class _Kept:
    """What one call of each step leaves to that of the next.

    Attributes:
        added: what the first block added to a row (B, ...) at the last step that computed all of that row.
        rest: what the others added to each of its outputs there.
    """

    added: Tensor
    rest: Outputs


class BlockCache:
    """The cache of some networks; `on` switches it on.

    Attributes:
        skipped: rows so far whose blocks were left out of a call.
        key: of the config, that asks for it.

    Args:
        networks: whose longest lists of blocks are cached.
        threshold: largest change of what the first block adds, over its size, at which the others are left out.
        step: which step of a call is next.

    Raises:
        InputError: a network has no list of blocks.
    """

    def __init__(self, networks: Iterable[torch.nn.Module], threshold: float, step: Callable[[], int | None], key: str):
        self.key, self.skipped = key, 0
        self._stacks = [_Stack(network, threshold, step, self) for network in networks]

    @contextmanager
    def on(self) -> Iterator[None]:
        """Put the cache between the networks and their blocks inside this context."""
        try:
            for stack in self._stacks:
                stack.put(stack.guarded)
            yield
        finally:
            for stack in self._stacks:
                stack.put(stack.blocks)
            self.reset()

    def reset(self) -> None:
        """Forget what was kept, before a call of the pipeline: its rows are others."""
        for stack in self._stacks:
            stack.reset()


class _Stack:
    """The longest list of blocks of a network."""

    def __init__(self, network: torch.nn.Module, threshold: float, step: Callable[[], int | None], counter: BlockCache):
        self._key = counter.key
        lists = [child for child in network.children() if isinstance(child, torch.nn.ModuleList) and len(child) > 1]
        if not lists:
            raise InputError(
                f"{self._key}: {type(network).__name__} has no list of blocks that could be left out, take null"
            )
        self.name = type(network).__name__
        self._list = max(lists, key=len)
        self.blocks = list(self._list)
        last = len(self.blocks) - 1
        self.guarded = [
            _Guarded(block, self._head if i == 0 else self._tail if i == last else self._inner)
            for i, block in enumerate(self.blocks)
        ]
        self._threshold, self._step, self._counter = threshold, step, counter
        self._stream: int | None = None  # which of a block's outputs goes on with what entered, once that is known
        self.reset()

    def put(self, blocks: list[torch.nn.Module]) -> None:
        for i, block in enumerate(blocks):
            self._list[i] = block

    def reset(self) -> None:
        self._kept: dict[int, _Kept] = {}  # by the place of a call among those of its step
        self._now: tuple[int | None, int] = (None, -1)  # the step, and that place
        self._added = self._keeps = None
        self._output: Any = None  # the first block's, of this call
        self._skips = False

    def _head(self, block: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        step, (before, place) = self._step(), self._now
        self._now = (step, place + 1 if step == before else 0)
        entered = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        self._output = block(*args, **kwargs)
        outputs = _outputs(self._output)
        streams = [i for i, x in enumerate(outputs) if x is not None and x.shape == getattr(entered, "shape", None)]
        if not streams:
            raise InputError(f"{self._key}: the blocks of {self.name} do not add to what enters them, take null")
        if self._stream not in streams:
            self._stream = streams[0] if len(streams) == 1 else None
        if self._stream is None:  # a prompt has as many tokens as the picture: the nearer one is what has entered
            self._stream = min(streams, key=lambda i: float((outputs[i] - entered).abs().sum()))
        self._added = outputs[self._stream] - entered
        kept = self._kept.get(self._now[1])
        rows = len(self._added)
        if kept is None or kept.added.shape != self._added.shape:
            self._keeps = torch.zeros(rows, dtype=torch.bool, device=self._added.device)
        else:
            change = (self._added - kept.added).flatten(1).abs().mean(1)
            self._keeps = change <= self._threshold * kept.added.flatten(1).abs().mean(1)
        self._skips = bool(self._keeps.all())
        self._counter.skipped += rows * self._skips
        return self._output

    def _inner(self, block: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        return self._output if self._skips else block(*args, **kwargs)

    def _tail(self, block: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        place, head = self._now[1], _outputs(self._output)
        kept = self._kept.get(place)
        if self._skips:
            return _like(
                self._output, tuple(None if r is None else x + r for x, r in zip(head, kept.rest, strict=True))
            )
        output = block(*args, **kwargs)
        ends = _outputs(output)
        if len(ends) != len(head) or any(
            end is not None and (x is None or end.shape != x.shape) for end, x in zip(ends, head, strict=True)
        ):
            raise InputError(
                f"{self._key}: the last block of {self.name} returns something else than the first, take null"
            )
        if any(end is not None and len(end) != len(self._added) for end in ends):
            raise InputError(f"{self._key}: the outputs of a block have unequal numbers of rows, take null")
        rest = tuple(None if end is None else end - x for end, x in zip(ends, head, strict=True))
        added = self._added
        if bool(self._keeps.any()):  # these rows go on as if they were alone
            rest = tuple(
                None if r is None else _by_row(self._keeps, k, r) for r, k in zip(rest, kept.rest, strict=True)
            )
            added = _by_row(self._keeps, kept.added, added)
            output = _like(
                output,
                tuple(
                    None if r is None else _by_row(self._keeps, x + r, end)
                    for x, r, end in zip(head, rest, ends, strict=True)
                ),
            )
        self._kept[place] = _Kept(added, rest)
        return output


class _Guarded(torch.nn.Module):
    """What stands in a block's place: it asks `run` to call the block, or not to."""

    def __init__(self, block: torch.nn.Module, run: Callable[[torch.nn.Module, tuple, dict[str, Any]], Any]):
        super().__init__()
        self.block, self._run = block, run

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("block"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(self.block, args, kwargs)


def _outputs(output: Any) -> Outputs:
    return tuple(output) if isinstance(output, (tuple, list)) else (output,)


def _like(output: Any, values: Outputs) -> Any:
    """Values in the form of a block's output."""
    return values if isinstance(output, (tuple, list)) else values[0]


def _by_row(chosen: Tensor, yes: Tensor, no: Tensor) -> Tensor:
    """Rows (B, ...) of `yes` where they are chosen, else of `no`."""
    return torch.where(chosen.view(-1, *[1] * (yes.ndim - 1)), yes, no)
