"""A velocity field (any `nn.Module`) as a policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any

import torch

from flowgrpo.data.prompts import Row
from flowgrpo.errors import InputError
from flowgrpo.flow.pipeline import slice_probe
from samplers.kernels import State


class FieldPolicy:
    """A velocity field as the policy, without a pipeline.

    Args:
        field: the network; `field(x, sigma, rows)` maps x (B, ...) and sigma (B,) to a velocity (B, ...).
        shape: shape of one state, without the batch.
        sigmas: the schedule, float32 values from 1 down to 0; see `samplers.schedule.linear_sigmas`.
        decode: maps states to samples; the identity by default.
    """

    def __init__(
        self,
        field: torch.nn.Module,
        shape: Sequence[int],
        sigmas: Sequence[float] | torch.Tensor,
        decode: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ):
        self.modules = {"field": field}
        self.shape = tuple(shape)
        self.sigmas = tuple(float(sigma) for sigma in sigmas)
        self.evaluations, self.pins = 0, False
        self.takes: set[str] = set()
        self._decode = decode
        self._mixes_levels: bool | None = None

    def prepare(self, rows: Sequence[Row], key: str = "model.call") -> None:
        """Do nothing: a field has no prompt embeddings."""

    def offload(self) -> None:
        """Do nothing: a field has no text encoders."""

    def call_overrides(self, **call: Any) -> AbstractContextManager[None]:
        """Return an empty context; raise InputError for any argument, since a field has none."""
        if call:
            raise InputError(f"eval.call.{next(iter(call))}: a velocity field takes no call arguments")
        return nullcontext()

    def unguided(self) -> dict[str, Any]:
        """Return no arguments: a field has no guidance."""
        return {}

    def limited(self, part: Sequence[float] | None, switch: Callable[[bool], object]) -> AbstractContextManager[None]:
        """Return an empty context; raise InputError if a part of the schedule is given."""
        if part is not None:
            raise InputError("eval.adapter_steps: a velocity field is sampled with all of its training, take null")
        return nullcontext()

    def start(self, rows: Sequence[Row]) -> State:
        """Return standard normal states, each from its row's seed."""
        device = next(self.modules["field"].parameters()).device
        noise = [torch.randn(self.shape, generator=torch.Generator().manual_seed(row.seed)) for row in rows]
        return (torch.stack(noise).to(device),)

    def mixes_levels(self, rows: Sequence[Row]) -> bool:
        """Return whether the field heeds the sigma of each row; the first of `rows` is probed once."""
        if self._mixes_levels is None:
            evaluations = self.evaluations
            self._mixes_levels = slice_probe.mixes_levels(self, rows[0], slice_probe.EXACT)
            self.evaluations = evaluations
        return self._mixes_levels

    def velocity(self, state: State, sigma: float | torch.Tensor, rows: Sequence[Row]) -> State:
        """Return the field at `sigma`, a number or a tensor (B,)."""
        (x,) = state
        self.evaluations += len(x)
        return (self.modules["field"](x, torch.as_tensor(sigma, device=x.device).expand(len(x)), rows),)

    def travel(self, state: State, steps: range, rows: Sequence[Row], onward: Callable[[State], State]) -> None:
        """Take several steps, each by `onward`: velocity -> next state."""
        for step in steps:
            state = onward(self.velocity(state, self.sigmas[step], rows))

    @torch.no_grad()
    def finish(self, state: State, sigmas: Sequence[float], rows: Sequence[Row]) -> State:
        """Take Euler steps from the first to the last of `sigmas`."""
        (x,) = state
        for sigma, following in pairwise(sigmas):
            x = x + self.velocity((x,), sigma, rows)[0] * (following - sigma)
        return (x,)

    @torch.no_grad()
    def decode(self, state: State, rows: Sequence[Row]) -> torch.Tensor:
        """Return the decoded states; without a decoder, the states themselves."""
        return state[0].float() if self._decode is None else self._decode(state[0])

    @torch.no_grad()
    def generate(self, rows: Sequence[Row]) -> torch.Tensor:
        """Return decoded samples of whole Euler runs."""
        return self.decode(self.finish(self.start(rows), self.sigmas, rows), rows)
