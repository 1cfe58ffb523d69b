"""The policy: what samples, and what is trained.

A policy is a velocity field under conditions, with a start and a decoder. `DiffusersPolicy` is any diffusers flow pipeline,
unmodified: our scheduler sits in it, and its own `__call__` runs for whatever slice of the schedule is asked for, so
rollout and update are the same code on the same numbers. `FieldPolicy` is any `nn.Module` velocity field.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from diffusers import DiffusionPipeline

from flowgrpo.data import conditions
from flowgrpo.data.prompts import Row
from flowgrpo.errors import InputError
from flowgrpo.flow.pipeline import attention, fitting, traits
from flowgrpo.flow.pipeline.call import OURS, checked_call
from flowgrpo.flow.pipeline.embeddings import EmbeddingCache, Shape, fingerprint
from flowgrpo.flow.pipeline.latents import Latents
from samplers.kernels import State
from samplers.scheduler import FlowSDEScheduler, Step


class Policy(Protocol):
    """What growth, the update and the gallery ask of a model.

    Attributes:
        modules: the networks that compute the velocity, by name; these are trained.
        sigmas: the schedule, float32 values from (about) 1 down to 0.
        evaluations: how many samples the modules have processed so far; a guided sample in two branches counts 2.
    """

    modules: dict[str, torch.nn.Module]
    sigmas: tuple[float, ...]
    evaluations: int

    def prepare(self, rows: Sequence[Row]) -> None:
        """Do once what depends on the conditions of rows only, before training starts."""

    def rest(self) -> None:
        """Make room: everything is prepared."""

    def start(self, rows: Sequence[Row]) -> State:
        """Initial states (B, ...) in the storage dtype, each from its row's seed alone."""

    def velocity(self, state: State, sigma: float, rows: Sequence[Row]) -> State:
        """Velocity of each tensor of `state` at `sigma`; carries gradients unless under `torch.no_grad`."""

    def decode(self, state: State, rows: Sequence[Row]) -> torch.Tensor:
        """Samples of final states: float32 images (B, 3, H, W) in [0, 1], or what the model makes instead."""

    def generate(self, rows: Sequence[Row]) -> torch.Tensor:
        """Decoded samples of whole ODE runs, as the user would get them."""

    def calling(self, **call: Any) -> AbstractContextManager[None]:
        """Other arguments of the model's call for a while, as evaluation may want them."""


class DiffusersPolicy:
    """An unmodified diffusers flow pipeline as the policy.

    Attributes:
        takes: names of the call's arguments that rows may give as columns.
        pads: whether rows of unequal prompts may share a call; settled by `check`.
        rows_per_call: most rows of a call, None for any number; settled by `check`.
        lands: whether decoding walks a last step that lands on the state; settled by `check`.

    Args:
        pipe: the pipeline; its scheduler is replaced, its text encoder calls are cached.
        call: arguments for the pipeline's `__call__`, handed through as they are.
        autocast: dtype in which the modules compute when it differs from that of their weights.
        text_encoders: `keep`, `offload` or `free`; see `EmbeddingCache`.

    Raises:
        InputError: the pipeline is no flow pipeline, or `call` names an argument it does not have.
    """

    def __init__(
        self,
        pipe: DiffusionPipeline,
        call: dict[str, Any] | None = None,
        autocast: torch.dtype | None = None,
        text_encoders: str = "keep",
    ):
        self.pipe, self.autocast = pipe, autocast
        self.stock_scheduler = pipe.scheduler
        try:
            self.scheduler = FlowSDEScheduler.from_config(pipe.scheduler.config, kernel="ode")
        except ValueError as error:
            raise InputError(f"model.path: {type(pipe).__name__} cannot be trained here: {error}") from None
        pipe.scheduler = self.scheduler
        pipe.set_progress_bar_config(disable=True)
        self._run = inspect.unwrap(type(pipe).__call__)  # without its torch.no_grad
        self.call = checked_call(type(pipe), call or {})
        self.embeddings = EmbeddingCache(pipe, text_encoders)
        self.latents = Latents(pipe)
        self.pads, self.rows_per_call, self.lands = True, None, False
        self._settled: set[bool] = set()  # for rows of one prompt, of several
        self._shapes: dict[Any, tuple[Shape, ...]] = {}
        self._started: State = ()  # some row's
        self.takes = set(inspect.signature(self._run).parameters) - {"self", *OURS}
        self.modules = {
            name: module
            for name, module in pipe.components.items()
            if name.startswith(("transformer", "unet")) and isinstance(module, torch.nn.Module)
        }
        if not self.modules:
            raise InputError(f"model.path: {type(pipe).__name__} has no transformer (or unet) to train")
        for component in pipe.components.values():
            if isinstance(component, torch.nn.Module):
                component.requires_grad_(False).eval()
        traits.apply(pipe)
        attention.refuse_inexact(pipe)
        self.evaluations = 0
        for module in self.modules.values():
            module.register_forward_pre_hook(self._count, with_kwargs=True)
        self._sigmas: tuple[float, ...] | None = None

    @property
    def sigmas(self) -> tuple[float, ...]:
        """The pipeline's own table for its call arguments; known once a row was started."""
        if self._sigmas is None:
            self.start([Row("", 0)])
        return self._sigmas

    @contextmanager
    def calling(self, **call: Any) -> Iterator[None]:
        """Other call arguments for a while, as evaluation may want them; None removes one."""
        before = self.call, self._sigmas, self.latents.places, self._started
        merged = {k: v for k, v in {**self.call, **call}.items() if v is not None}
        checked_call(type(self.pipe), call, "eval.call")
        self.call, self._sigmas, self.latents.places, self._started = merged, None, [], ()
        try:
            yield
        finally:
            self.call, self._sigmas, self.latents.places, self._started = before

    def prepare(self, rows: Sequence[Row]) -> None:
        """Encode the prompts of rows."""
        for row in rows:
            self._lengths(row)

    def rest(self) -> None:
        """Let the text encoders rest."""
        self.embeddings.rest()

    def start(self, rows: Sequence[Row]) -> State:
        """Initial states of the pipeline's own making, from each row's seed."""
        if not self.latents.places:
            counted = self.evaluations  # finding out how a pipeline works is no work of the run's
            self.latents.locate(lambda: [step.sample for step in self.walk(rows[:1], range(1))[1]])
            self.evaluations = counted
        states = []
        for block in self._blocks(rows):
            self.walk(rows[block], range(0))
            states.append(self.latents.initial())
            table = tuple(self.scheduler.noise_levels.tolist())
            self._sigmas = self._sigmas or table
            if table != self._sigmas:
                raise InputError(
                    f"prompts: {rows[block][0].prompt!r} asks for another schedule than rows before it, by a column or by "
                    "its size; the rows of a run walk one schedule"
                )
        self.check_shapes(states)
        return _joined(states)

    def check_shapes(self, states: Sequence[State]) -> None:
        """Rows are stacked, so their states must have one shape.

        Raises:
            InputError: they have not.
        """
        shapes = {tuple(tuple(x.shape[1:]) for x in state) for state in states}
        if len(shapes) > 1:
            found = " and ".join(" with ".join(str(shape) for shape in one) for one in sorted(shapes)[:2])
            raise InputError(
                f"prompts: rows start from latents of unequal shapes, {found}; set model.call.height and width, or give "
                "conditions of one size"
            )

    def velocity(self, state: State, sigma: float, rows: Sequence[Row]) -> State:
        """What the pipeline hands to its scheduler at `sigma`: one step of its own loop."""
        table = self.sigmas
        steps = range(at := table.index(sigma), at + 1) if sigma in table else (sigma, 0.0)
        velocities = []
        for block in self._blocks(rows):
            _, made = self.walk(rows[block], steps, tuple(x[block] for x in state))
            velocities.append(tuple(step.velocity for step in made))
        return _joined(velocities)

    @torch.no_grad()
    def decode(self, state: State, rows: Sequence[Row]) -> torch.Tensor:
        """The pipeline's own decoding of final states.

        Where a pipeline's loop does to its latents what decoding needs (puts a picture's frame back, say), a last step is
        walked that lands on the given state; its evaluation is decoding, and not counted.
        """
        counted = self.evaluations
        last = len(self.sigmas) - 2
        steps = range(last, last + 1) if self.lands else range(0)
        parts = []
        for block in self._blocks(rows):
            own = tuple(x[block] for x in state)
            parts.append(self.walk(rows[block], steps, own, own if self.lands else (), output_type="pt")[0])
        self.evaluations = counted
        return torch.cat(parts).float()

    @torch.no_grad()
    def generate(self, rows: Sequence[Row]) -> torch.Tensor:
        """Whole runs of the pipeline by ODE."""
        return torch.cat([self.walk(rows[b], None, output_type="pt")[0] for b in self._blocks(rows)]).float()

    def sample(self, prompts: Sequence[str], seed: int = 0) -> torch.Tensor:
        """Images float32 (B, 3, H, W) in [0, 1] of B prompts, by the pipeline's own ODE; prompt i starts from seed + i."""
        return self.generate([Row(prompt, seed + i) for i, prompt in enumerate(prompts)])

    @torch.no_grad()
    def check(self, rows: Sequence[Row], key: str = "model.call") -> None:
        """Run a few samples, to see that the pipeline can be walked in steps, and how; see `flowgrpo.flow.pipeline.fitting`.

        Args:
            rows: some of those to come, best of unequal prompts.
            key: the place of the call arguments in the config.

        Raises:
            InputError: the pipeline refuses its call arguments, or counts its own steps (skip-layer guidance and the like).
        """
        self._settled |= {False, len({row.prompt for row in rows}) > 1}
        fitting.fit(self, rows, key)

    def _blocks(self, rows: Sequence[Row]) -> list[slice]:
        """The rows cut into neighbours that one call can take: a call has one picture, one negative prompt, ... for all."""
        unequal = len({row.prompt for row in rows}) > 1
        if len(rows) > 1 and unequal not in self._settled:
            self._settled |= {False, unequal}
            other = max(rows, key=lambda row: abs(len(row.prompt) - len(rows[0].prompt)))
            fitting.settle_batching(self, [rows[0], other])
        kinds = [(self._conditions_key(row), self._lengths(row)) for row in rows]
        blocks: list[slice] = []
        for i, kind in enumerate(kinds):
            last = blocks[-1] if blocks else None
            full = last is not None and self.rows_per_call is not None and i - last.start >= self.rows_per_call
            if last is not None and not full and kinds[i - 1] == kind:
                blocks[-1] = slice(last.start, i + 1)
            else:
                blocks.append(slice(i, i + 1))
        return blocks

    def _lengths(self, row: Row) -> Any:
        """What must be equal of the embeddings of rows that share a call; found by encoding the row once."""
        key = (row.prompt, self._conditions_key(row), repr(self.call))
        if key not in self._shapes:
            seen = self.embeddings.seen = []
            with torch.no_grad():
                self.walk([row], range(0))
            self.embeddings.seen = None
            self._shapes[key] = tuple(seen)
            if self.latents.places:
                self._started = self._started or self.latents.initial()
                self.check_shapes([self._started, self.latents.initial()])
        return tuple(shape.alike(self.pads) for shape in self._shapes[key])

    def _conditions(self, row: Row) -> dict[str, Any]:
        """The columns of a row that the pipeline takes."""
        return {k: conditions.loaded(v) for k, v in row.columns.items() if k in self.takes and v is not None}

    def _conditions_key(self, row: Row) -> str:
        return repr({k: fingerprint(v) for k, v in row.columns.items() if k in self.takes})

    def walk(
        self,
        rows: Sequence[Row],
        steps: range | tuple[float, ...] | None,
        state: State | None = None,
        landing: State = (),
        output_type: str = "latent",
        record: bool = False,
    ) -> tuple[Any, list[Step]]:
        """The pipeline's own call on rows that may share one, iterating `steps` only; what it returned, and its steps.

        Every call gets freshly seeded generators, so what a pipeline samples of its conditioning is the same each time.
        """
        self.scheduler.only(steps, landing)
        self.scheduler.recording = record or steps is not None
        self.latents.reset(state)
        given = {**self.call, **self._conditions(rows[0])}
        if len(rows) > 1:  # a text that stands for all rows is one of each for some pipelines, and one alone for others
            given = {k: [v] * len(rows) if "prompt" in k and isinstance(v, str) else v for k, v in given.items()}
        generators = [torch.Generator("cpu").manual_seed(row.seed) for row in rows]
        device = self.pipe._execution_device.type
        devices = [torch.cuda.current_device()] if device == "cuda" else []
        with (
            torch.autocast(device, dtype=self.autocast, enabled=self.autocast is not None),
            torch.random.fork_rng(devices),
        ):
            torch.manual_seed(0)  # for what is drawn past the generators
            output = self._run(
                self.pipe,
                prompt=[row.prompt for row in rows] if len(rows) > 1 else rows[0].prompt,  # some take no lists
                generator=generators if len(rows) > 1 else generators[0],
                output_type=output_type,
                return_dict=False,
                **given,
            )
        made = list(self.scheduler.history)
        self.scheduler.history.clear()
        return output[0], made

    def _count(self, module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        batch = next(value for value in (*args, *kwargs.values()) if isinstance(value, (torch.Tensor, list)))
        self.evaluations += len(batch)


def _joined(parts: Sequence[State]) -> State:
    """The rows of several states as one."""
    return parts[0] if len(parts) == 1 else tuple(torch.cat(column) for column in zip(*parts, strict=True))
