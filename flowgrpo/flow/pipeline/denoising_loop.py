"""An unmodified diffusers pipeline that runs any slice of its schedule.

`FlowSDEScheduler` replaces the pipeline's scheduler, and the pipeline's own `__call__` runs each slice. Rollout and
update therefore run the same code with the same inputs. `slice_probe` and `batching` decide which rows may share a call.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from diffusers import DiffusionPipeline

from flowgrpo.data import conditions
from flowgrpo.data.prompts import Row
from flowgrpo.errors import InputError
from flowgrpo.flow.pipeline.call_arguments import RESERVED, check_call
from flowgrpo.flow.pipeline.inputs import masked_state, strength
from flowgrpo.flow.pipeline.inputs.image_cache import EncodedPictures
from flowgrpo.flow.pipeline.inputs.latents import LatentSlot, LatentSlots, Source
from flowgrpo.flow.pipeline.inputs.masked_state import Watch
from flowgrpo.flow.pipeline.inputs.modality import read_output
from flowgrpo.flow.pipeline.inputs.prompt_embeddings import EmbeddingCache, EmbeddingShape, fingerprint
from flowgrpo.flow.pipeline.networks import attention, traits
from flowgrpo.flow.pipeline.networks.switches import remember_device
from flowgrpo.training.distributed.fsdp_lockstep import stands_in
from flowgrpo.training.run.random_states import fixed_seed
from rewards.audio import Films
from samplers.kernels import State
from samplers.scheduler import FlowSDEScheduler, StepRecord

LOGGER = logging.getLogger(__name__)


def flow_scheduler(pipeline: str, config: Mapping[str, Any]) -> FlowSDEScheduler:
    """Return the scheduler that replaces the one of this config; raise InputError if that one is not for a flow."""
    try:
        return FlowSDEScheduler.from_config(config, kernel="ode")
    except ValueError as error:
        raise InputError(f"model.path: {pipeline} cannot be trained here: {error}") from None


class DenoisingLoop:
    """A pipeline that runs one slice of its schedule per call.

    Raise InputError if the pipeline is not a flow pipeline, or `call` names an unknown argument.

    Attributes:
        takes: names of the call arguments that rows may give as columns.
        modules: the networks that compute the velocity, by name.
        evaluations: samples that the modules have processed so far; a guided sample with two branches counts 2.
        pins: whether the loop overwrites a part of the state after each step, as inpainting does.

    Args:
        pipe: the pipeline. It is changed in place: the scheduler is replaced, prompts are cached, weights are frozen.
        call: arguments for the pipeline's `__call__`.
        autocast: dtype in which the modules compute, if it is not the dtype of their weights.
        text_encoders: `keep`, `offload` or `free`; see `EmbeddingCache`.
    """

    def __init__(
        self,
        pipe: DiffusionPipeline,
        call: dict[str, Any] | None = None,
        *,
        autocast: torch.dtype | None = None,
        text_encoders: str = "keep",
    ):
        self.pipe, self.autocast = pipe, autocast
        self.stock_scheduler = pipe.scheduler
        self.scheduler = flow_scheduler(type(pipe).__name__, pipe.scheduler.config)
        pipe.scheduler = self.scheduler
        strength.follow(pipe, self.scheduler)
        pipe.set_progress_bar_config(disable=True)
        self._run = inspect.unwrap(type(pipe).__call__)  # without the decorator torch.no_grad
        self.call = check_call(type(pipe), call or {})
        remember_device(pipe)
        self.takes = set(inspect.signature(self._run).parameters) - {"self", *RESERVED}
        self.embeddings = EmbeddingCache(pipe, text_encoders)
        self.pictures = EncodedPictures(pipe)
        self.latents = LatentSlots(pipe)
        self._located: dict[str, tuple[list[LatentSlot], bool]] = {}  # slots and `pins`, by call
        self.pins = self._spared = False
        self._checked_masks: set[str] = set()  # keys of the conditions whose mask was checked
        self.evaluations = 0
        self.modules: dict[str, torch.nn.Module] = {}
        self.take_networks()
        self._sigmas: tuple[float, ...] | None = None
        self._first_state: State = ()  # of the first row; the states of all rows must have its shapes
        self._embedding_shapes: dict[Any, tuple[EmbeddingShape, ...]] = {}
        # Meta tensors that rows prepared before the slots were located, by call; their shapes are checked later.
        self._prepared_before: dict[str, list[dict[Source, torch.Tensor]]] = {}

    def take_networks(self) -> None:
        """Freeze the pipeline's networks and count their evaluations; call it again after networks are replaced.

        Raise InputError if the pipeline has none, or `attention.refuse_inexact` refuses them.
        """
        self.modules.clear()
        self.modules |= traits.networks(self.pipe)
        if not self.modules:
            raise InputError(f"model.path: {type(self.pipe).__name__} has no transformer (or unet) to train")
        self._located.clear()
        for component in self.pipe.components.values():
            if isinstance(component, torch.nn.Module):
                component.requires_grad_(False).eval()
        traits.apply(self.pipe)
        attention.refuse_inexact(self.pipe)
        for module in self.modules.values():
            module.register_forward_pre_hook(self._count, with_kwargs=True)

    @property
    def sigmas(self) -> tuple[float, ...]:
        """The schedule for the current call arguments: float32 sigmas that descend to 0."""
        if self._sigmas is None:
            self.start([Row("", 0)])
        assert self._sigmas is not None
        return self._sigmas

    @contextmanager
    def call_overrides(self, **call: Any) -> Iterator[None]:
        """Return a context with other call arguments, for example for evaluation; the value None removes an argument."""
        before = self.call, self._sigmas, self.latents.slots, self._first_state, self.pins
        merged = {k: v for k, v in {**self.call, **call}.items() if v is not None}
        check_call(type(self.pipe), call, "eval.call")
        self.call, self._sigmas, self._first_state = merged, None, ()
        self.latents.slots, self.pins = self._located.get(self.call_key, ([], False))
        try:
            yield
        finally:
            self.call, self._sigmas, self.latents.slots, self._first_state, self.pins = before

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Return a context that does not change `evaluations`, for probing and decoding."""
        before = self.evaluations
        try:
            yield
        finally:
            self.evaluations = before

    def run_slice(
        self,
        rows: Sequence[Row],
        steps: range | tuple[float, ...] | torch.Tensor | None,
        state: State | None = None,
        *,
        landing: State = (),
        onward: Callable[[torch.Tensor], torch.Tensor] | None = None,
        output_type: str = "latent",
        record: bool = False,
        watch: Watch | None = None,
    ) -> tuple[Any, list[StepRecord]]:
        """Call the pipeline once for a part of its schedule; return its latents or samples, and its recorded steps.

        Each call gets freshly seeded generators, so that the pipeline draws the same noise for its conditions each time.

        Args:
            rows: prompts and seeds; the call takes the conditions of the first row.
            steps: see `FlowSDEScheduler.restrict`.
            state: replaces the latents that the pipeline prepares.
            landing: states that the steps return in place of their results.
            onward: takes the steps in place of the scheduler, which then records none.
            output_type: `latent`, or `pt` to decode.
            record: record steps even if the whole schedule runs.
            watch: called after each step of the loop.
        """
        self.scheduler.restrict(steps, landing, onward)
        self.scheduler.recording = record or steps is not None
        self.latents.reset(state)
        # Not if the call decodes: given latents, some pipelines draw other noise for decoding.
        latents = self.latents.arguments() if output_type == "latent" else {}
        given = {**latents, **self.call, **self._conditions(rows[0])}
        if len(rows) > 1:  # some pipelines need one text per row, others take one for all
            given = {k: [v] * len(rows) if "prompt" in k and isinstance(v, str) else v for k, v in given.items()}
        if watch is not None:
            given["callback_on_step_end"] = watch
        generators = [torch.Generator("cpu").manual_seed(row.seed) for row in rows]
        device = self.pipe._execution_device.type
        devices = [torch.cuda.current_device()] if device == "cuda" else []
        with (
            # The cache of autocast would keep a copy of every weight until the call ends.
            torch.autocast(device, dtype=self.autocast, enabled=self.autocast is not None, cache_enabled=False),
            fixed_seed(devices),  # for draws without a generator
            self.pictures.at_hand(),
        ):
            try:
                output = self._run(
                    self.pipe,
                    prompt=[row.prompt for row in rows] if len(rows) > 1 else rows[0].prompt,  # some take no lists
                    generator=generators if len(rows) > 1 else generators[0],
                    output_type=output_type,
                    return_dict=False,
                    **given,
                )
                made = output[0] if output_type == "latent" else read_output(type(self.pipe), output)
                return made, list(self.scheduler.history)
            finally:  # also free it after an out-of-memory error
                self.scheduler.history.clear()

    @torch.no_grad()
    def locate_latents(self, rows: Sequence[Row]) -> None:
        """Run the first row to find where the pipeline keeps its state, unless this is known for the current call."""
        if not self.latents.slots:
            with self.uncounted():
                self.latents.locate(lambda: [step.sample for step in self.run_slice(rows[:1], range(1))[1]])
                self._probe_step(rows[:1])
            self._located[self.call_key] = self.latents.slots, self.pins
            for prepared in self._prepared_before.pop(self.call_key, []):
                self._check_shapes(self.latents.initial(prepared))

    @torch.no_grad()
    def start(self, rows: Sequence[Row]) -> State:
        """Return the initial states (B, ...) that the pipeline draws from each row's seed.

        Raise InputError if a row needs another schedule than earlier rows.
        """
        self.locate_latents(rows)
        self.run_slice(rows, range(0))
        table = tuple(self.scheduler.noise_levels.tolist())
        self._sigmas = self._sigmas or table
        if table != self._sigmas:
            raise InputError(
                f"prompts: {rows[0].prompt!r} asks for another schedule than rows before it, by a column or by "
                "its size; the rows of a run walk one schedule"
            )
        return self.latents.initial()

    def velocity(self, state: State, sigma: float | torch.Tensor, rows: Sequence[Row]) -> State:
        """Return the velocity that the pipeline hands to its scheduler at `sigma`, by running one step of its loop.

        A tensor (B,) gives each row its own sigma; `slice_probe.mixes_levels` says where unequal ones are valid. The
        velocity is 0 where the loop pins the state, because the loop overwrites the step's result there.
        """
        if isinstance(sigma, torch.Tensor):
            if len(levels := set(sigma.tolist())) > 1:
                return self._velocity_of_rows(state, sigma, rows)
            (sigma,) = levels
        steps: range | tuple[float, ...] = (sigma, 0.0)
        if sigma in self.sigmas:
            index = self.sigmas.index(sigma)
            steps = range(index, index + 1)
        recorded, watch = self.step(rows, steps, state)
        if watch is None:
            return tuple(step.velocity for step in recorded)
        if (key := self.conditions_key(rows[0])) not in self._checked_masks:  # once per picture: it synchronises
            self._checked_masks.add(key)
            if not watch.frees(recorded[0]):
                LOGGER.warning(masked_state.whole(rows[0]))
        return (watch.free(recorded[0]),)

    def _velocity_of_rows(self, state: State, sigmas: torch.Tensor, rows: Sequence[Row]) -> State:
        velocities: list[torch.Tensor] = []

        def keep(velocity: torch.Tensor) -> torch.Tensor:
            velocities.append(velocity)
            return velocity

        self.run_slice(rows, sigmas, state, onward=keep)
        return tuple(velocities)

    def finish(self, state: State, sigmas: Sequence[float], rows: Sequence[Row]) -> State:
        """Take ODE steps along `sigmas` in one call, bit-identical to single steps. Not valid if the loop `pins`."""
        steps: range | tuple[float, ...] = tuple(sigmas)
        if steps[0] in self.sigmas:
            first = self.sigmas.index(steps[0])
            steps = range(first, first + len(steps) - 1) if self.sigmas[first : first + len(steps)] == steps else steps
        recorded = self.run_slice(rows, steps, state)[1][-len(state) :]
        return tuple(step.next_sample.to(x.dtype) for step, x in zip(recorded, state, strict=True))

    def travel(self, state: State, steps: range, rows: Sequence[Row], onward: Callable[[State], State]) -> None:
        """Take several steps in one call, each by `onward`: velocity -> next state.

        The velocities are those of `velocity`, bit for bit. Not valid if the loop `pins`, or the state has several
        tensors: the pipeline asks for the result of one before it knows the velocity of the next.
        """
        device = self.pipe._execution_device.type

        def taken(velocity: torch.Tensor) -> torch.Tensor:
            with torch.autocast(device, enabled=False):  # that of the pipeline is no matter of the step
                return onward((velocity,))[0]

        self.run_slice(rows, steps, state, onward=taken)

    def step(
        self, rows: Sequence[Row], steps: range | tuple[float, ...], state: State
    ) -> tuple[list[StepRecord], Watch | None]:
        """Run one step from a state; return a record per tensor of the state, and the `Watch` (None unless the loop `pins`).

        `steps` is a range of length 1 with the index of the step, or the two sigmas of the step.
        """
        if not self.pins:
            return self.run_slice(rows, steps, state)[1], None
        watch, landing = Watch(), ()
        if isinstance(steps, tuple):
            steps, landing = (self.sigmas[0], *steps), state
        elif steps.start > 0:
            steps, landing = range(steps.start - 1, steps.stop), state
        _, recorded = self.run_slice(rows, steps, state, landing=landing, watch=watch)
        return recorded[-1:], watch

    def decode(self, state: State, rows: Sequence[Row], by_landing: bool) -> torch.Tensor | Films:
        """Decode final states with the pipeline's own code; its evaluations are not counted.

        `by_landing` runs a last step that returns the given state, for loops that prepare their latents for decoding,
        for example by restoring the frame of a given picture.
        """
        last = len(self.sigmas) - 2
        steps = range(last, last + 1) if by_landing else range(0)
        with self.uncounted():
            return self.run_slice(rows, steps, state, landing=state if by_landing else (), output_type="pt")[0]

    def generate(self, rows: Sequence[Row], state: State | None = None) -> torch.Tensor | Films:
        """Return decoded samples of whole ODE runs, from a given state or from the rows' seeds."""
        return self.run_slice(rows, None, state, output_type="pt")[0]

    def encode(self, row: Row) -> tuple[EmbeddingShape, ...]:
        """Encode a row's prompt at its first use; return the shapes of its embeddings.

        Raise InputError if the row's latents have another shape than those of earlier rows; if the latents are not
        located yet, `locate_latents` raises it later.
        """
        key = (row.prompt, self.conditions_key(row), self.call_key)
        if key not in self._embedding_shapes:
            seen = self.embeddings.seen = []
            try:
                with torch.no_grad():
                    self.run_slice([row], range(0))
            finally:
                self.embeddings.seen = None
            if self.latents.slots:
                self._check_shapes(self.latents.initial())
            else:
                self._prepared_before.setdefault(self.call_key, []).append(self.latents.outlines())
            self._embedding_shapes[key] = tuple(seen)
        return self._embedding_shapes[key]

    @property
    def call_key(self) -> str:
        """A key of the current call arguments."""
        return repr(sorted(self.call.items()))

    def _check_shapes(self, state: State) -> None:
        self._first_state = self._first_state or state
        check_equal_shapes([self._first_state, state])

    def conditions_key(self, row: Row) -> str:
        """Return a key of the row's conditions (picture, negative prompt, ...); rows of one call share it."""
        return repr({k: fingerprint(v) for k, v in row.columns.items() if k in self.takes})

    def _conditions(self, row: Row) -> dict[str, Any]:
        return {k: conditions.load_file(v) for k, v in row.columns.items() if k in self.takes and v is not None}

    def _probe_step(self, rows: Sequence[Row]) -> None:
        """Find out whether the loop pins a part of the state, and whether the call takes latents as an argument.

        The step starts from the negated state, so that it differs from the state that the pipeline draws.
        """
        state = tuple(-x for x in self.latents.initial())
        watch = Watch() if len(self.latents.slots) == 1 and "callback_on_step_end" in self.takes else None
        _, recorded = self.run_slice(rows, range(1), state, watch=watch)
        if watch is not None and watch.sees_pins(recorded[0]):
            if not watch.frees(recorded[0]):
                raise InputError(masked_state.whole(rows[0]))
            self.pins = True
            for module in self.modules.values():
                if not self._spared:
                    masked_state.spare(module, lambda: self.scheduler.lands)
            self._spared = True
            return
        takes, velocities = inspect.signature(self._run).parameters, [step.velocity for step in recorded]
        self.latents.hand_over(
            takes, velocities, lambda: [x.velocity for x in self.run_slice(rows, range(1), state)[1]]
        )

    def _count(self, module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if stands_in() or (self.pins and self.scheduler.lands):  # the result of this call is not used
            return
        batch = next(value for value in (*args, *kwargs.values()) if isinstance(value, (torch.Tensor, list)))
        self.evaluations += len(batch)


def check_equal_shapes(states: Sequence[State]) -> None:
    """Raise InputError for states of unequal shapes, which cannot be stacked."""
    shapes = {tuple(tuple(x.shape[1:]) for x in state) for state in states}
    if len(shapes) > 1:
        found = " and ".join(" with ".join(str(shape) for shape in one) for one in sorted(shapes)[:2])
        raise InputError(
            f"prompts: rows start from latents of unequal shapes, {found}; set model.call.height and width, or give "
            "conditions of one size"
        )
