"""The policy: the model that samples and is trained.

A policy is a conditional velocity field with a distribution of initial states and a decoder. `DiffusersPolicy` wraps any
diffusers flow pipeline, for any number of rows at once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from diffusers import DiffusionPipeline, ModelMixin

from flowgrpo.data.prompts import Row
from flowgrpo.flow.pipeline import adapter_steps
from flowgrpo.flow.pipeline.batching import Capabilities, cut, join
from flowgrpo.flow.pipeline.call_arguments import unguided
from flowgrpo.flow.pipeline.denoising_loop import DenoisingLoop, check_equal_shapes
from flowgrpo.flow.pipeline.networks.compiled_blocks import CompiledBlocks
from flowgrpo.flow.pipeline.slice_probe import mixes_levels, probe, probe_batching, refusals, tolerance_of
from flowgrpo.training.run.phases import phase
from rewards.audio import Films, join_samples
from rewards.compute import leave_out_cudnn_attention
from samplers.kernels import State

LOGGER = logging.getLogger(__name__)


class Policy(Protocol):
    """Protocol of a trainable model.

    Attributes:
        modules: its trained networks.
        evaluations: samples that they have processed.
        takes: names of the call arguments that rows may give as columns.
    """

    modules: dict[str, torch.nn.Module]
    evaluations: int
    takes: set[str]

    @property
    def call(self) -> dict[str, Any]:
        """Return the arguments of the model's call."""

    @property
    def sigmas(self) -> tuple[float, ...]:
        """Return the schedule: float32 values from (about) 1 down to 0."""

    @property
    def pins(self) -> bool:
        """Return whether the loop overwrites a part of each state; known after the first call of `start`."""

    def prepare(self, rows: Sequence[Row], key: str = "model.call") -> None:
        """Encode the rows' conditions, such as prompts; `key` names the call arguments in errors."""

    def offload(self) -> None:
        """Free the device memory that is not needed after all rows are prepared."""

    def start(self, rows: Sequence[Row]) -> State:
        """Return initial states (B, ...) in the dtype of latents; each depends on its row's seed only."""

    def mixes_levels(self, rows: Sequence[Row]) -> bool:
        """Return whether rows at unequal noise levels may share a call of `velocity`; `rows` are examples."""

    def velocity(self, state: State, sigma: float | torch.Tensor, rows: Sequence[Row]) -> State:
        """Return the velocity of each tensor of `state` at `sigma`; differentiable unless under `torch.no_grad`.

        Where the policy `mixes_levels`, `sigma` may be a float32 tensor (B,) on the CPU, with a sigma for each row.
        """

    def travel(self, state: State, steps: range, rows: Sequence[Row], onward: Callable[[State], State]) -> None:
        """Call `onward(velocity)` at each of `steps`, first at `state`; its result is the next state."""

    def finish(self, state: State, sigmas: Sequence[float], rows: Sequence[Row]) -> State:
        """Take ODE steps from the first to the last of `sigmas`."""

    def decode(self, state: State, rows: Sequence[Row]) -> torch.Tensor | Films:
        """Decode final states to float32 samples: images (B, 3, H, W) in [0, 1], or another modality."""

    def generate(self, rows: Sequence[Row]) -> torch.Tensor | Films:
        """Return decoded samples of whole ODE runs."""

    def call_overrides(self, **call: Any) -> AbstractContextManager[None]:
        """Return a context with other call arguments, for example for evaluation."""

    def unguided(self) -> dict[str, Any]:
        """Return the call arguments that switch guidance off."""

    def limited(self, part: Sequence[float] | None, switch: Callable[[bool], object]) -> AbstractContextManager[None]:
        """Return a context in which `generate` uses the trained weights in `part` of the schedule, else the base model."""


class DiffusersPolicy:
    """An unmodified diffusers flow pipeline as the policy; rows are cut into batches that share a call.

    The constructor disables cuDNN attention in the whole process; see `leave_out_cudnn_attention`.

    Attributes:
        walk: the `DenoisingLoop`, which also describes the constructor's arguments.
        capabilities: which rows may share a call, and how final states are decoded. Probed by `check`, or before
            rows first share a call: once for rows of one prompt, once for rows of several. Later probes only tighten it.
        compiled: the compiled blocks of its networks; None where `model.compile` is false.
    """

    def __init__(self, pipe: DiffusionPipeline, call: dict[str, Any] | None = None, **options: Any):
        leave_out_cudnn_attention()
        self.walk = walk = DenoisingLoop(pipe, call, **options)
        self.pipe, self.modules, self.embeddings = walk.pipe, walk.modules, walk.embeddings
        self.compiled: CompiledBlocks | None = None
        self.scheduler, self.stock_scheduler = walk.scheduler, walk.stock_scheduler
        self.autocast, self.takes = walk.autocast, walk.takes
        self.capabilities = Capabilities()
        self._probed: set[bool] = set()  # False: rows of one prompt were probed; True: rows of several prompts
        self._mixes_levels: dict[str, bool] = {}  # by call

    @property
    def call(self) -> dict[str, Any]:
        """Return the arguments of the pipeline's call."""
        return self.walk.call

    @property
    def sigmas(self) -> tuple[float, ...]:
        """Return the schedule for the current call arguments: float32 sigmas that descend to 0."""
        return self.walk.sigmas

    @property
    def evaluations(self) -> int:
        """Return how many samples the modules have processed; a guided sample with two branches counts 2."""
        return self.walk.evaluations

    @evaluations.setter
    def evaluations(self, count: int) -> None:
        self.walk.evaluations = count

    @property
    def pins(self) -> bool:
        """Return whether the loop overwrites a part of each state; see `DenoisingLoop`."""
        return self.walk.pins

    def call_overrides(self, **call: Any) -> AbstractContextManager[None]:
        """Return a context with other call arguments; the value None removes an argument."""
        return self.walk.call_overrides(**call)

    def unguided(self) -> dict[str, Any]:
        """Return the call arguments that switch guidance off; a guidance-distilled model keeps its scale."""
        networks: Iterable[ModelMixin] = self.modules.values()
        embedded = any(network.config.get("guidance_embeds") for network in networks)
        return unguided(type(self.pipe), embedded)

    def limited(
        self, part: Sequence[float] | None, switch: Callable[[bool], object], key: str = adapter_steps.KEY
    ) -> AbstractContextManager[None]:
        """Return a context in which whole runs use adapters only in `part` of the schedule; None means all of it."""
        return nullcontext() if part is None else adapter_steps.limited(self.pipe, part, switch, key)

    def prepare(self, rows: Sequence[Row], key: str = "model.call") -> None:
        """Encode the prompts of rows; this needs no transformer or U-Net.

        Raise InputError if the pipeline refuses its call arguments, or the text encoders were freed.
        """
        with refusals(self.walk, key), phase("encoding", len(rows)) as encoding:
            for row in rows:
                self.walk.encode(row)
                encoding.advance()
        self.embeddings.cut.tell(len({row.prompt for row in rows}))

    def offload(self) -> None:
        """Free the text encoders' device memory until a new prompt needs them."""
        self.embeddings.offload()

    def start(self, rows: Sequence[Row]) -> State:
        """Return initial states that the pipeline draws from each row's seed.

        Raise InputError if the rows have states of unequal shapes, or unequal schedules.
        """
        self.walk.locate_latents(rows)
        batches = [batch for batch, _ in self._cut(rows)]
        if self.capabilities.starts_alone:
            batches = [[row] for row in rows]
        states = [self.walk.start(batch) for batch in batches]
        check_equal_shapes(states)
        return join(states)

    def mixes_levels(self, rows: Sequence[Row]) -> bool:
        """Return whether rows at unequal noise levels may share a call; the first of `rows` is probed once a call."""
        if self.capabilities.max_batch == 1:
            return False
        if self.walk.call_key not in self._mixes_levels:
            with phase("trial"), self.walk.uncounted():
                mixes = mixes_levels(self.walk, rows[0], tolerance_of(self.walk))
            self._mixes_levels[self.walk.call_key] = mixes
            if not mixes:
                LOGGER.info(
                    "%s takes one time a call: noise levels of an update share no calls", type(self.pipe).__name__
                )
        return self._mixes_levels[self.walk.call_key]

    def velocity(self, state: State, sigma: float | torch.Tensor, rows: Sequence[Row]) -> State:
        """Return the velocity that the pipeline hands to its scheduler at `sigma`; see `DenoisingLoop.velocity`."""
        if isinstance(sigma, torch.Tensor):
            parts = self._cut(rows, (*state, sigma))
            return join([self.walk.velocity(tuple(part), levels, batch) for batch, (*part, levels) in parts])
        return join([self.walk.velocity(part, sigma, batch) for batch, part in self._cut(rows, state)])

    def travel(self, state: State, steps: range, rows: Sequence[Row], onward: Callable[[State], State]) -> None:
        """Take several steps, in one call if the pipeline `travels` and the rows share one; see `DenoisingLoop.travel`."""
        if not self.capabilities.travels or len(state) > 1 or self.pins or len(self._cut(rows)) > 1:
            for step in steps:
                state = onward(self.velocity(state, self.sigmas[step], rows))
        else:
            self.walk.travel(state, steps, rows, onward)

    @torch.no_grad()
    def finish(self, state: State, sigmas: Sequence[float], rows: Sequence[Row]) -> State:
        """Take ODE steps in one call of the pipeline; see `DenoisingLoop.finish`."""
        return join([self.walk.finish(part, sigmas, batch) for batch, part in self._cut(rows, state)])

    @torch.no_grad()
    def decode(self, state: State, rows: Sequence[Row]) -> torch.Tensor | Films:
        """Decode final states with the pipeline's own code; its evaluations are not counted."""
        batches, by_landing = self._cut(rows, state), self.capabilities.decodes_by_landing
        return join_samples([self.walk.decode(part, batch, by_landing) for batch, part in batches])

    @torch.no_grad()
    def generate(self, rows: Sequence[Row]) -> torch.Tensor | Films:
        """Return decoded samples of whole ODE runs of the pipeline."""
        batches = self._cut(rows)
        if self.capabilities.starts_alone:
            batches = self._cut(rows, self.start(rows))
        return join_samples([self.walk.generate(batch, part or None) for batch, part in batches])

    def sample(self, prompts: Sequence[str], seed: int = 0) -> torch.Tensor | Films:
        """Return samples, such as images float32 (B, 3, H, W) in [0, 1], of B prompts; prompt i starts from seed + i."""
        return self.generate([Row(prompt, seed + i) for i, prompt in enumerate(prompts)])

    def check(self, rows: Sequence[Row], key: str = "model.call") -> None:
        """Probe how the pipeline runs in slices, on a few samples of `rows`, best with unequal prompts; see `probe`.

        Raise InputError if the pipeline refuses its call arguments, or its steps depend on each other.
        """
        with phase("trial"):
            self.capabilities = probe(self.walk, rows, key, self.capabilities)
        self._probed |= {False, _unequal(rows)}

    def _cut(self, rows: Sequence[Row], state: State = ()) -> list[tuple[Sequence[Row], State]]:
        """Cut rows and state into batches; probe beforehand whether such rows may share a call, unless this is known."""
        if len(rows) > 1 and _unequal(rows) not in self._probed:
            other = max(rows, key=lambda row: abs(len(row.prompt) - len(rows[0].prompt)))
            self.capabilities = probe_batching(self.walk, [rows[0], other], self.capabilities)
            self._probed |= {False, _unequal(rows)}
        return cut(self.walk, self.capabilities, rows, state)


def _unequal(rows: Sequence[Row]) -> bool:
    return len({row.prompt for row in rows}) > 1
