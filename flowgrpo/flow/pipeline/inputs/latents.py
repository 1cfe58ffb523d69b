"""Latent slots: where a pipeline keeps its state, so that a given state can replace it before the loop.

A pipeline draws its latents in a method `prepare_latents` (or `prepare_audio_latents`, ...). That method runs unchanged,
for its ids, masks and conditions; then the given state replaces the latents that it returned. A probe finds out which
returned tensor holds the latents, and how its elements reach the scheduler. No pipeline is hard-coded here.

Drawing latents that are replaced costs time: the host draws them while the GPU waits. A method draws none if it gets latents
as an argument. So if the call takes such an argument, and passing it changes nothing else, the state is passed there too.
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

LOGGER = logging.getLogger(__name__)
Source = tuple[str, int, int]  # method, its number of earlier runs, item of its output


@dataclass(frozen=True, kw_only=True)
class LatentSlot:
    """The place of one tensor of the state among the tensors that a pipeline's `prepare_*latents*` methods return.

    Attributes:
        source: the method, its call and the item of its output that give the prepared tensor.
        order: (n,) indices of the elements of a prepared row that reach the scheduler, in the scheduler's order; None if all
            do, in the same order.
        shape, dtype: shape of one row at the scheduler, and its dtype there.
        argument: argument of the pipeline's call that takes the tensor; None if there is none.
    """

    source: Source
    order: torch.Tensor | None
    shape: torch.Size
    dtype: torch.dtype
    argument: str | None = None

    def extract(self, prepared: torch.Tensor) -> torch.Tensor:
        """Return the state (B, *shape) in a prepared tensor (B, ...)."""
        if self.order is not None:
            prepared = prepared.flatten(1)[:, self.order.to(prepared.device)].unflatten(1, self.shape)
        return prepared.to(self.dtype)

    def insert(self, prepared: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """Return a prepared tensor (B, ...) whose elements in this slot are those of `state` (B, *shape)."""
        if self.order is None:
            return state
        flat = prepared.flatten(1).to(state.dtype, copy=True)
        flat[:, self.order.to(flat.device)] = state.flatten(1)
        return flat.view_as(prepared)


class LatentSlots:
    """Wrappers of a pipeline's `prepare_*latents*` methods, which record their results and put a given state into them.

    Attributes:
        state: replaces the latents of the next call; None keeps them.
        prepared: all float tensors that these methods returned in the last call.
        slots: the slot of each tensor of the state among `prepared`; empty until `locate` has run.
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
        """Set the state for the next call of the pipeline, and forget the last call."""
        self.state, self.prepared = state, {}

    def locate(self, first_samples: Callable[[], Sequence[torch.Tensor]]) -> None:
        """Find the slots by running the pipeline to its first step.

        `first_samples` makes this run and returns the samples (1, ...) that reached the scheduler, one per call of `step`.
        Raise InputError if one of them is not a selection of elements of a prepared tensor.
        """
        samples = [sample.clone() for sample in first_samples()]
        prepared = dict(self.prepared)
        self.slots = []
        for number, sample in enumerate(samples):
            same = [
                s for s, t in prepared.items() if t.shape == sample.shape and torch.equal(t.to(sample.dtype), sample)
            ]
            order = None
            if len(same) > 1:  # for example, a method returns the latents and the noise, which are equal
                source = self._find_moving(number, same, first_samples)
            elif same:
                source = same[0]
            else:
                source, order = self._find_permutation(number, first_samples)
            self.slots.append(LatentSlot(source=source, order=order, shape=sample.shape[1:], dtype=sample.dtype))

    def initial(self, prepared: Mapping[Source, torch.Tensor] | None = None) -> State:
        """Return the state (B, ...) in `prepared`, by default in the tensors that the last call prepared."""
        prepared = self.prepared if prepared is None else prepared
        return tuple(slot.extract(prepared[slot.source]) for slot in self.slots)

    def hand_over(
        self, takes: Container[str], expected: Sequence[torch.Tensor], again: Callable[[], Sequence[torch.Tensor]]
    ) -> None:
        """Pass the state as an argument from now on, if a step then gives the same velocities and no warning.

        Args:
            takes: names of the arguments of a call.
            expected: velocities of the last step, which got its state from `prepare_latents` alone.
            again: repeats that step and returns its velocities; if it raises, the state is not passed as an argument.
        """
        drawing, prepared = self.slots, self._other_tensors()
        self.slots = self._taking(takes)
        if self.slots == drawing:
            return
        try:
            with _warnings_heard() as heard:
                velocities = again()
        except Exception as error:
            if is_out_of_memory(error) or is_lost(error):
                raise
            LOGGER.info("this pipeline takes no latents as an argument (%s: %s)", type(error).__name__, error)
            velocities = []
        tensors, others = [*velocities, *self._other_tensors()], [*expected, *prepared]
        if heard or len(tensors) != len(others) or not all(map(torch.equal, tensors, others)):
            self.slots = drawing

    def _other_tensors(self) -> list[torch.Tensor]:
        sources = {slot.source for slot in self.slots}
        return [tensor for source, tensor in self.prepared.items() if source not in sources]

    def _taking(self, takes: Container[str]) -> list[LatentSlot]:
        """Return the slots with `argument` set if the call takes it: `latents` for `prepare_latents`, and so on."""
        named = [(slot, slot.source[0].removeprefix("prepare_")) for slot in self.slots]
        return [
            replace(slot, argument=name) if slot.order is None and slot.source[1] == 0 and name in takes else slot
            for slot, name in named
        ]

    def arguments(self) -> dict[str, torch.Tensor]:
        """Return the part of the state that the next call takes as arguments."""
        state = () if self.state is None or not self.slots else zip(self.slots, self.state, strict=True)
        return {slot.argument: tensor for slot, tensor in state if slot.argument is not None}

    def outlines(self) -> dict[Source, torch.Tensor]:
        """Return the tensors that the last call prepared, as meta tensors."""
        return {source: tensor.to("meta") for source, tensor in self.prepared.items()}

    def _find_moving(
        self, number: int, sources: Sequence[Source], first_samples: Callable[[], Sequence[torch.Tensor]]
    ) -> Source:
        """Return, of several equal prepared tensors, the last one whose changes reach the scheduler as sample `number`."""
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
        """Return the prepared tensor that reaches the scheduler as sample `number`, and its elements' order (n,) there.

        The numbers 0, 1, 2, ... pass through the pipeline in place of the tensor, which shows the order.
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
            "model.path: this pipeline's loop changes other latents than it prepares, so its steps cannot run one by one"
        )

    def _wrap(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:

        @functools.wraps(method)
        def prepare(*args: Any, **kwargs: Any) -> Any:
            output = method(*args, **kwargs)
            call = len({c for n, c, _ in self.prepared if n == name})
            several = isinstance(output, (tuple, list))
            items = list(output) if several else [output]
            for i, item in enumerate(items):
                if isinstance(item, torch.Tensor) and item.is_floating_point():
                    copies = self.state is None  # then the loop may overwrite the tensor, so keep a copy
                    self.prepared[name, call, i] = item.clone() if copies else item
                    items[i] = self._swap((name, call, i), item)
            return type(output)(items) if several else items[0]

        return prepare

    def _swap(self, source: Source, item: torch.Tensor) -> torch.Tensor:
        if self._substitute is not None and self._substitute[0] == source:
            return self._substitute[1].to(item.device)
        if self.state is not None:
            for slot, tensor in zip(self.slots, self.state, strict=True):
                if slot.source == source:
                    item = slot.insert(item, tensor)
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
    """Collect the warnings of diffusers instead of showing them."""
    listener, logger = _Listener(), logging.getLogger("diffusers")
    before, logger.handlers = logger.handlers, [listener]
    try:
        yield listener.heard
    finally:
        logger.handlers = before
