"""Adapters that act in a part of the schedule only; the base model takes the other steps.

This is MixGRPO's remedy against reward hacking (arXiv 2507.21802): the trained model takes the first steps, and the model
before training takes the others. In a part `first:end`, step k of n (counted from 0) uses the adapters if
first <= k / n < end. Departures from MixGRPO's code:

 1. Its option is a number of first steps, 30 of 50 in its script; here that is the part 0:0.6, and a part may begin later.
 2. It holds two whole networks; here one network switches its adapters on and off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from diffusers import DiffusionPipeline
from peft.tuners.tuners_utils import BaseTunerLayer
from torch.utils.hooks import RemovableHandle

from flowgrpo.errors import InputError
from flowgrpo.flow.pipeline.networks import traits
from flowgrpo.training.distributed.fsdp_lockstep import stands_in

KEY = "eval.adapter_steps"
Switch = Callable[[bool], object]


@contextmanager
def limited(pipe: DiffusionPipeline, part: Sequence[float], switch: Switch, key: str = KEY) -> Iterator[None]:
    """Return a context in which whole calls of a pipeline use adapters in a part of the schedule only.

    `part` is (first, end), as fractions of the steps. `switch` turns the adapters of all networks on (True) or off
    (False). Raise InputError if the pipeline reuses values of an earlier step, or hides its current step.
    """
    limit = _Limit(pipe, part, switch, key)
    handles = limit.hook()
    try:
        yield
        limit.refuse_unreported_steps()
    finally:
        for handle in handles:
            handle.remove()
        limit.set(True)


def limit_adapters(pipe: DiffusionPipeline, first: float, end: float) -> None:
    """Let a stock pipeline use its adapters only from `first` to `end` (fractions of its steps); for code in model cards."""
    _Limit(pipe, (first, end), lambda on: enable(traits.networks(pipe).values(), on), KEY).hook()


def enable(networks: Iterable[torch.nn.Module], on: bool) -> None:
    """Switch the adapters of networks on or off."""
    for network in networks:
        for layer in network.modules():
            if isinstance(layer, BaseTunerLayer):
                layer.enable_adapters(on)


class _Limit:
    """A pre-forward hook that switches the adapters on where `part` of the schedule begins, and off where it ends."""

    def __init__(self, pipe: DiffusionPipeline, part: Sequence[float], switch: Switch, key: str):
        self._pipe, (self._first, self._end), self._switch, self._key = pipe, part, switch, key
        self._on, self._last_steps = True, {0: 0}  # number of steps of a schedule -> last step seen in it

    def hook(self) -> list[RemovableHandle]:
        """Register the hook on all components that a step calls and that may have adapters."""
        called = {
            name: m for name, m in self._pipe.components.items() if name.startswith((*traits.TRAINED, traits.SHARING))
        }
        return [
            network.register_forward_pre_hook(self, with_kwargs=True)
            for network in called.values()
            if isinstance(network, torch.nn.Module)
        ]

    def __call__(self, network: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if stands_in():
            return
        on = self._first <= self._progress() < self._end
        if on != self._on and kwargs.get("kv_cache_mode") == "cached":
            raise InputError(
                f"{self._key}: {type(self._pipe).__name__} keeps keys and values of its first step for the others, which "
                "would be of both models; where its call has use_kv_cache, set it to false"
            )
        self.set(on)

    def set(self, on: bool) -> None:
        """Switch the adapters on or off, unless they already are."""
        if on != self._on:
            self._switch(on)
            self._on = on

    def _progress(self) -> float:
        scheduler = self._pipe.scheduler
        begin = scheduler.begin_index or 0  # above 0 if the pipeline starts from a noised picture
        index = begin if scheduler.step_index is None else scheduler.step_index
        done, count = index - begin, len(scheduler.timesteps) - begin
        self._last_steps[count] = max(done, self._last_steps.get(count, 0))
        return done / count

    def refuse_unreported_steps(self) -> None:
        """Raise InputError if the scheduler did not report all steps of a call."""
        count, last = max(self._last_steps.items())
        if last < count - 1:
            raise InputError(
                f"{self._key}: {type(self._pipe).__name__} counts its steps where nobody sees it, remove it"
            )
