"""The policy: the model that samples and is trained.

A policy is a velocity field under conditions, with a start and a decoder. `DiffusersPolicy` is any diffusers flow pipeline,
unmodified (see `walk`), for any number of rows at once.
"""

from __future__ import annotations

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
from flowgrpo.flow.pipeline.slice_probe import probe, probe_batching, refusals
from flowgrpo.training.run.phases import phase
from rewards.compute import leave_out_cudnn_attention
from samplers.kernels import State


class Policy(Protocol):
    """The protocol of a model that can be trained: what rollout, update and evaluation call.

    Attributes:
        modules: the networks that compute the velocity, by name; these are trained.
        evaluations: how many samples the modules have processed so far; a guided sample in two branches counts 2.
    """

    modules: dict[str, torch.nn.Module]
    evaluations: int

    @property
    def call(self) -> dict[str, Any]:
        """The arguments of the model's call."""

    @property
    def sigmas(self) -> tuple[float, ...]:
        """The schedule, float32 values from (about) 1 down to 0."""

    @property
    def pins(self) -> bool:
        """Whether something else stands in place of a part of each state; known once a row was started."""

    def prepare(self, rows: Sequence[Row], key: str = "model.call") -> None:
        """Compute once what depends on the rows' conditions only (embeddings), before training starts.

        Args:
            key: the place of the call arguments in the config.
        """

    def offload(self) -> None:
        """Free the device memory of what is not needed once all rows are prepared."""

    def start(self, rows: Sequence[Row]) -> State:
        """Initial states (B, ...) in the storage dtype, each from its row's seed alone."""

    def velocity(self, state: State, sigma: float, rows: Sequence[Row]) -> State:
        """Velocity of each tensor of `state` at `sigma`; carries gradients unless under `torch.no_grad`."""

    def finish(self, state: State, sigmas: Sequence[float], rows: Sequence[Row]) -> State:
        """Where ODE steps from the first to the last of some sigmas take `state`."""

    def decode(self, state: State, rows: Sequence[Row]) -> torch.Tensor:
        """Samples of final states: float32 images (B, 3, H, W) in [0, 1], or what the model makes instead."""

    def generate(self, rows: Sequence[Row]) -> torch.Tensor:
        """Decoded samples of whole ODE runs, as the user would get them."""

    def call_overrides(self, **call: Any) -> AbstractContextManager[None]:
        """Return a context in which the model's call has other arguments, as in evaluation."""

    def unguided(self) -> dict[str, Any]:
        """The call arguments that switch guidance off."""

    def limited(self, part: Sequence[float] | None, switch: Callable[[bool], object]) -> AbstractContextManager[None]:
        """Return a context in which `generate` takes steps outside a part of the schedule with its training off."""


class DiffusersPolicy:
    """An unmodified diffusers flow pipeline as the policy: rows are cut into batches that it can take in one call.

    Where one is made, PyTorch leaves cuDNN's attention out in the whole process; see `leave_out_cudnn_attention`.

    Attributes:
        walk: the pipeline, one call at a time; `pipe`, `modules`, `embeddings`, `takes` and the schedulers are its own.
        capabilities: which rows may share a call, and how final states are decoded; found by `check`, or when rows of one
            prompt, or of several, first come together. What was found is only ever tightened.

    Args:
        pipe: the pipeline; its scheduler is replaced, its text encoder calls are cached.
        call: arguments for the pipeline's `__call__`, handed through as they are.
        options: `autocast` and `text_encoders`, see `DenoisingLoop`.

    Raises:
        InputError: the pipeline is not a flow pipeline, or `call` names an argument it does not have.
    """

    def __init__(self, pipe: DiffusionPipeline, call: dict[str, Any] | None = None, **options: Any):
        leave_out_cudnn_attention()
        self.walk = walk = DenoisingLoop(pipe, call, **options)
        self.pipe, self.modules, self.embeddings = walk.pipe, walk.modules, walk.embeddings
        self.scheduler, self.stock_scheduler = walk.scheduler, walk.stock_scheduler
        self.autocast, self.takes = walk.autocast, walk.takes
        self.capabilities = Capabilities()
        self._probed: set[bool] = set()  # for rows of one prompt (False), of several (True)

    @property
    def call(self) -> dict[str, Any]:
        """The arguments of the pipeline's call."""
        return self.walk.call

    @property
    def sigmas(self) -> tuple[float, ...]:
        """The pipeline's own schedule for its call arguments: float32 sigmas that descend to 0."""
        return self.walk.sigmas

    @property
    def evaluations(self) -> int:
        """How many samples the modules have processed so far; a guided sample in two branches counts 2."""
        return self.walk.evaluations

    @evaluations.setter
    def evaluations(self, count: int) -> None:
        self.walk.evaluations = count

    @property
    def pins(self) -> bool:
        """Whether the pipeline's loop puts something else in place of a part of what each step moved to; see
        `DenoisingLoop`.
        """
        return self.walk.pins

    def call_overrides(self, **call: Any) -> AbstractContextManager[None]:
        """Return a context in which the call has other arguments, as in evaluation; None removes one."""
        return self.walk.call_overrides(**call)

    def unguided(self) -> dict[str, Any]:
        """The call arguments that switch guidance off; a guidance-distilled model is told the same scale as before."""
        networks: Iterable[ModelMixin] = self.modules.values()
        embedded = any(network.config.get("guidance_embeds") for network in networks)
        return unguided(type(self.pipe), embedded)

    def limited(
        self, part: Sequence[float] | None, switch: Callable[[bool], object], key: str = adapter_steps.KEY
    ) -> AbstractContextManager[None]:
        """Return a context in which whole runs take steps outside a part of the schedule with adapters off; None: no step.

        Args:
            part, switch, key: see `adapter_steps.limited`.
        """
        return nullcontext() if part is None else adapter_steps.limited(self.pipe, part, switch, key)

    def prepare(self, rows: Sequence[Row], key: str = "model.call") -> None:
        """Encode the prompts of rows; this needs no network of the pipeline.

        Args:
            key: the place of the call arguments in the config.

        Raises:
            InputError: the pipeline refuses its call arguments, or the text encoders were freed.
        """
        with refusals(self.walk, key), phase("encoding", len(rows)) as encoding:
            for row in rows:
                self.walk.encode(row)
                encoding.advance()
        self.embeddings.cut.tell(len({row.prompt for row in rows}))

    def offload(self) -> None:
        """Free the text encoders' device memory, until a new prompt needs them."""
        self.embeddings.offload()

    def start(self, rows: Sequence[Row]) -> State:
        """Initial states of the pipeline's own making, from each row's seed.

        Raises:
            InputError: the rows start from states of unequal shapes, or walk unequal schedules.
        """
        self.walk.locate_latents(rows)
        batches = [batch for batch, _ in self._cut(rows)]
        if self.capabilities.starts_alone:
            batches = [[row] for row in rows]
        states = [self.walk.start(batch) for batch in batches]
        check_equal_shapes(states)
        return join(states)

    def velocity(self, state: State, sigma: float, rows: Sequence[Row]) -> State:
        """What the pipeline hands to its scheduler at `sigma`: one step of its own loop."""
        return join([self.walk.velocity(part, sigma, batch) for batch, part in self._cut(rows, state)])

    @torch.no_grad()
    def finish(self, state: State, sigmas: Sequence[float], rows: Sequence[Row]) -> State:
        """Where ODE steps take a state, all of them in one call of the pipeline; see `DenoisingLoop.finish`."""
        return join([self.walk.finish(part, sigmas, batch) for batch, part in self._cut(rows, state)])

    @torch.no_grad()
    def decode(self, state: State, rows: Sequence[Row]) -> torch.Tensor:
        """The pipeline's own decoding of final states; none of its evaluations are counted."""
        batches, by_landing = self._cut(rows, state), self.capabilities.decodes_by_landing
        return torch.cat([self.walk.decode(part, batch, by_landing) for batch, part in batches]).float()

    @torch.no_grad()
    def generate(self, rows: Sequence[Row]) -> torch.Tensor:
        """Decoded samples of whole ODE runs of the pipeline."""
        batches = self._cut(rows)
        if self.capabilities.starts_alone:
            batches = self._cut(rows, self.start(rows))
        return torch.cat([self.walk.generate(batch, part or None) for batch, part in batches]).float()

    def sample(self, prompts: Sequence[str], seed: int = 0) -> torch.Tensor:
        """Images float32 (B, 3, H, W) in [0, 1] of B prompts, by the pipeline's own ODE; prompt i starts from seed + i."""
        return self.generate([Row(prompt, seed + i) for i, prompt in enumerate(prompts)])

    def check(self, rows: Sequence[Row], key: str = "model.call") -> None:
        """Run a few samples, to see that the pipeline can run in slices, and how; see `probe`.

        Args:
            rows: some of those to come, best of unequal prompts.
            key: the place of the call arguments in the config.

        Raises:
            InputError: the pipeline refuses its call arguments, or counts its own steps (skip-layer guidance and the like).
        """
        with phase("trial"):
            self.capabilities = probe(self.walk, rows, key, self.capabilities)
        self._probed |= {False, _unequal(rows)}

    def _cut(self, rows: Sequence[Row], state: State = ()) -> list[tuple[Sequence[Row], State]]:
        """Rows and state cut into batches; the first time that rows come together, how far they can is probed."""
        if len(rows) > 1 and _unequal(rows) not in self._probed:
            other = max(rows, key=lambda row: abs(len(row.prompt) - len(rows[0].prompt)))
            self.capabilities = probe_batching(self.walk, [rows[0], other], self.capabilities)
            self._probed |= {False, _unequal(rows)}
        return cut(self.walk, self.capabilities, rows, state)


def _unequal(rows: Sequence[Row]) -> bool:
    """Whether rows have several prompts among them."""
    return len({row.prompt for row in rows}) > 1
