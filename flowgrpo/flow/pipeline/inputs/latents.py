"""Putting a state into a pipeline's loop, whatever the loop does to its latents before the first step.

A pipeline makes its latents in a `prepare_latents` (or `prepare_audio_latents`, ...). That method runs as ever, for its ids,
masks and conditions; what it returns is then changed so that the loop works on our state. Which of the returned tensors that
is, and how its elements reach the scheduler, is found by looking: nothing about any pipeline is written down here.

A method that is handed latents draws none, which the host would do while a GPU waits. So where a call takes them, and where
nothing else comes of it, the state is that argument, too.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from diffusers import DiffusionPipeline
from typing_extensions import override

from flowgrpo.errors import InputError
from flowgrpo.training.run.stop_reasons import is_lost
from rewards.memory import is_out_of_memory
from samplers.kernels import State

Source = tuple[str, int, int]  # method, how many times it had run before, item of what it returned


@dataclass(frozen=True, kw_only=True)
class LatentSlot:
    """Where one tensor of the state comes from.

    Attributes:
        source: the prepared tensor.
        order: (n,) which elements of a prepared row reach the scheduler, in its order; None when all do, as they are.
        shape: of one row at the scheduler.
        dtype: at the scheduler.
        argument: of the pipeline's call, by which it takes such a tensor and draws none; None where it takes none.
    """

    source: Source
    order: torch.Tensor | None
    shape: torch.Size
    dtype: torch.dtype
    argument: str | None = None

    def extract(self, prepared: torch.Tensor) -> torch.Tensor:
        """Return the state (B, *shape) that is in a prepared tensor (B, ...)."""
        if self.order is not None:
            prepared = prepared.flatten(1)[:, self.order.to(prepared.device)].unflatten(1, self.shape)
        return prepared.to(self.dtype)

    def insert(self, prepared: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """Return a prepared tensor (B, ...) with the state (B, *shape) in this slot."""
        if self.order is None:
            return state
        flat = prepared.flatten(1).to(state.dtype, copy=True)
        flat[:, self.order.to(flat.device)] = state.flatten(1)
        return flat.view_as(prepared)


class LatentSlots:
    """What a pipeline's `prepare_*latents*` methods return, seen and, where a state is given, replaced.

    Attributes:
        state: handed to the next call of the pipeline in place of its own latents; None hands nothing.
        prepared: all float tensors those methods returned in the last call.
        slots: where each tensor of the state is among them; empty until `locate` has run.
    """

    def __init__(self, pipe: DiffusionPipeline):
        self.state: State | None = None
        self.prepared: dict[Source, torch.Tensor] = {}
        self.slots: list[LatentSlot] = []
        self._substitute: tuple[Source, torch.Tensor] | None = None
        for name in dir(type(pipe)):
            if name.startswith("prepare") and "latents" in name:
                setattr(pipe, name, self._wrap(name, getattr(pipe, name)))

    def reset(self, state: State | None) -> None:
        """Before a call of the pipeline."""
        self.state, self.prepared = state, {}

    def locate(self, first_samples: Callable[[], Sequence[torch.Tensor]]) -> None:
        """Find the slots by running the pipeline to its first step.

        Args:
            first_samples: runs it for one row, and returns what reached the scheduler (1, ...), one tensor per `step`.

        Raises:
            InputError: what reaches the scheduler is no selection of anything prepared.
        """
        samples = [sample.clone() for sample in first_samples()]
        prepared = dict(self.prepared)
        self.slots = []
        for number, sample in enumerate(samples):
            same = [
                s for s, t in prepared.items() if t.shape == sample.shape and torch.equal(t.to(sample.dtype), sample)
            ]
            order = None
            if len(same) > 1:  # the picture's noise, say, of which nothing but noise is made
                source = self._find_moving(number, same, first_samples)
            elif same:
                source = same[0]
            else:
                source, order = self._find_permutation(number, first_samples)
            self.slots.append(LatentSlot(source=source, order=order, shape=sample.shape[1:], dtype=sample.dtype))

    def initial(self, prepared: Mapping[Source, torch.Tensor] | None = None) -> State:
        """The state (B, ...) that the pipeline prepared in its last call, or in the one that `prepared` is of."""
        prepared = self.prepared if prepared is None else prepared
        return tuple(slot.extract(prepared[slot.source]) for slot in self.slots)

    def hand_over(
        self, takes: Container[str], expected: Sequence[torch.Tensor], again: Callable[[], Sequence[torch.Tensor]]
    ) -> None:
        """Let calls take the state as arguments where a step has the same velocities so, prepares the rest as it did, and
        warns of nothing.

        Not where the pipeline refuses them, in whatever way: it is then called without, as it was.

        Args:
            takes: names of the arguments of a call.
            expected: velocities of the step that was run last, in which the state was no argument.
            again: runs it once more, and returns them.
        """
        drawing, prepared = self.slots, self._beside()
        self.slots = self._taking(takes)
        if self.slots == drawing:
            return
        try:
            with _warnings_heard() as heard:
                found = again()
        except Exception as error:
            if is_out_of_memory(error) or is_lost(error):
                raise
            found = []
        tensors, others = [*found, *self._beside()], [*expected, *prepared]
        if heard or len(tensors) != len(others) or not all(map(torch.equal, tensors, others)):
            self.slots = drawing

    def _beside(self) -> list[torch.Tensor]:
        """What else the pipeline prepared in its last call, of which the state is no part."""
        sources = {slot.source for slot in self.slots}
        return [tensor for source, tensor in self.prepared.items() if source not in sources]

    def _taking(self, takes: Container[str]) -> list[LatentSlot]:
        """The slots, with the arguments of a call that takes some: of `prepare_latents` it is `latents`."""
        named = [(slot, slot.source[0].removeprefix("prepare_")) for slot in self.slots]
        return [
            replace(slot, argument=name) if slot.order is None and slot.source[1] == 0 and name in takes else slot
            for slot, name in named
        ]

    def arguments(self) -> dict[str, torch.Tensor]:
        """The state as arguments of the next call, as far as it takes it so."""
        state = () if self.state is None or not self.slots else zip(self.slots, self.state, strict=True)
        return {slot.argument: tensor for slot, tensor in state if slot.argument is not None}

    def outlines(self) -> dict[Source, torch.Tensor]:
        """What was prepared in the last call, on the meta device: shapes alone."""
        return {source: tensor.to("meta") for source, tensor in self.prepared.items()}

    def _find_moving(
        self, number: int, sources: Sequence[Source], first_samples: Callable[[], Sequence[torch.Tensor]]
    ) -> Source:
        """Return the last of some prepared tensors that reaches the scheduler as its sample `number` when it is changed."""
        before = {source: self.prepared[source] + 1 for source in sources}
        for source in reversed(sources):
            self._substitute = (source, before[source])
            try:
                arrived = first_samples()[number]
            finally:
                self._substitute = None
            if torch.equal(arrived, before[source].to(arrived)):
                return source
        return sources[-1]

    def _find_permutation(
        self, number: int, first_samples: Callable[[], Sequence[torch.Tensor]]
    ) -> tuple[Source, torch.Tensor]:
        """Return which prepared tensor reaches the scheduler as its sample `number`, and its elements' order there (n,).

        The numbers 0, 1, 2, ... go through the pipeline in place of its latents, and which ones arrive where is read off.
        """
        candidates = {s: t.shape for s, t in self.prepared.items()}
        for source, shape in candidates.items():
            if shape[0] != 1:
                continue
            numbers = torch.arange(shape.numel(), dtype=torch.float32).view(shape)
            self._substitute = (source, numbers)
            try:
                arrived = first_samples()[number].flatten().float().cpu()
            finally:
                self._substitute = None
            order = arrived.round().long()
            if (
                torch.equal(order.float(), arrived)
                and len(order.unique()) == len(order) > 1
                and order.max() < shape.numel()
            ):
                return source, order
        raise InputError(
            "model.path: what this pipeline's loop works on is not among the latents it prepares, so it cannot walk in steps"
        )

    def _wrap(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return the method, noting what it returns, and with the given state in that."""

        @functools.wraps(method)
        def prepare(*args: Any, **kwargs: Any) -> Any:
            output = method(*args, **kwargs)
            call = len({c for n, c, _ in self.prepared if n == name})
            several = isinstance(output, (tuple, list))
            items = list(output) if several else [output]
            for i, item in enumerate(items):
                if isinstance(item, torch.Tensor) and item.is_floating_point():
                    own = self.state is None  # loops may write into what they prepared themselves
                    self.prepared[name, call, i] = item.clone() if own else item
                    items[i] = self._swap((name, call, i), item)
            return type(output)(items) if several else items[0]

        return prepare

    def _swap(self, source: Source, item: torch.Tensor) -> torch.Tensor:
        """Return what the pipeline gets for a prepared tensor: the numbers of a search, our state, or the tensor itself."""
        if self._substitute is not None and self._substitute[0] == source:
            return self._substitute[1].to(item.device)
        if self.state is not None:
            for slot, own in zip(self.slots, self.state, strict=True):
                if slot.source == source:
                    item = slot.insert(item, own)
        return item


class _Listener(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.heard: list[str] = []

    @override
    def emit(self, record: logging.LogRecord) -> None:
        self.heard.append(record.getMessage())


@contextmanager
def _warnings_heard() -> Iterator[list[str]]:
    """Collect what diffusers warns of, and nobody else hears."""
    listener, logger = _Listener(), logging.getLogger("diffusers")
    before, logger.handlers = logger.handlers, [listener]
    try:
        yield listener.heard
    finally:
        logger.handlers = before
