"""Rollouts by generators (`run.generators`): processes that only roll out, with weights `run.staleness` iterations old.

Before each iteration the first trainer sends its state to every generator, and each trainer receives the samples that a
generator has made meanwhile. The staleness is fixed, and the noise does not depend on the process. So the results equal
those of a run whose trainers roll out themselves. A resumed run repeats the rollouts that were under way.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed

from flowgrpo.training.distributed.channel import PATIENCE, Channel, End, pack
from flowgrpo.training.run.phases import phase
from flowgrpo.training.run.stop_reasons import Stopped
from flowgrpo.training.scoring.rollout_batch import Made
from flowgrpo.training.state import RunState
from flowgrpo.training.wing import Wing
from flowgrpo.training.workers.local_rollouts import LocalRollouts

LOGGER = logging.getLogger(__name__)
LOST = "process %d, which generated, has ended (%s); those that train make its samples from here on"


@dataclass(frozen=True)
class TrainerState:
    """The state of a trainer before an iteration, which a generator needs to roll out as the trainer would."""

    iteration: int
    weights: list[torch.Tensor]  # the trained tensors, in the order of `Weights.parameters`
    prompt_stats: dict[str, Any]  # see `PromptStats.state`
    of_wing: Any  # see `Wing.rollout_state`


class AsyncRollout:
    """Rollouts by the generators of a run. The constructor is a collective call of all processes.

    `local` makes samples on a generator, and on a trainer once its generator has ended.
    """

    def __init__(self, run: RunState, wing: Wing, local: LocalRollouts):
        self._run, self._wing, self._local = run, wing, local
        self._roles, self._rank = run.roles, run.accelerator.process_index
        self._post, self._lost = Channel(run.accelerator.device), set[int]()
        self._trainers = distributed.new_group(range(run.roles.trainers), backend="gloo", timeout=PATIENCE)

    def next(self, iteration: int) -> Made:
        """Send the state before an iteration to the generators, and return this trainer's samples of the iteration."""
        if self._rank == 0:
            run = self._run
            weights = [p.detach().cpu() for p in run.weights.parameters]
            self._send(TrainerState(iteration, weights, run.prompt_stats.state(), self._wing.rollout_state()))
        with phase("rollout"):
            rollout = self._receive_rollout(iteration)
            # Other trainers may wait longer than NCCL's timeout, hence a group of its own.
            distributed.barrier(group=self._trainers)  # type: ignore[arg-type]  # torch's stubs: not of new_group
        return rollout or self._local.next(iteration)

    @contextmanager
    def closing(self) -> Iterator[None]:
        """Return a context that ends the generators at its exit. The rollouts that they made ahead are dropped."""
        stopped = None
        try:
            yield
        except Stopped as error:
            stopped = error
        if not self._roles.generates(self._rank):
            run = self._run
            ahead = run.done + run.config.run.staleness
            for iteration in range(run.done, min(ahead, run.config.train.iterations)):
                self._receive_rollout(iteration)
            if self._rank == 0:
                self._send(End(stopped))
                for generator in self._living():
                    with self._detecting_loss(generator):
                        self._post.flush(generator)
        if stopped is not None:
            raise stopped

    def generate(self) -> None:
        """Roll out for the trainers, until they end; raise Stopped if training was stopped."""
        run, staleness, loaded = self._run, self._run.config.run.staleness, -1
        for iteration in range(run.done, run.config.train.iterations):
            for trainer in self._roles.trainers_served(self._rank, iteration):
                while loaded < max(run.done, iteration - staleness):
                    message = self._post.unpack(self._post.receive(0))
                    if isinstance(message, End):
                        return message.raise_if_stopped()
                    loaded = self._load(message)
                run.shard = next(shard for shard in run.shards if shard.index == trainer)
                self._post.send(self._local.next(iteration), trainer)
        while not isinstance(message := self._post.unpack(self._post.receive(0)), End):
            pass
        return message.raise_if_stopped()

    def _load(self, state: TrainerState) -> int:
        run = self._run
        run.weights.put(state.weights)
        run.prompt_stats.restore(state.prompt_stats)
        self._wing.restore_rollout_state(state.of_wing)
        run.versions.keep(state.iteration, state.prompt_stats)
        return state.iteration

    def _receive_rollout(self, iteration: int) -> Made | None:
        """Return the samples that a generator has made for this trainer; None if the generator has ended."""
        generator, content = self._roles.generator_for(self._rank, iteration), None
        if generator not in self._lost:
            with self._detecting_loss(generator):
                content = self._post.receive(generator)
        return None if content is None else self._post.unpack(content)

    def _send(self, message: TrainerState | End) -> None:
        # Older messages have surely been received: the trainers have the samples of the last iteration, whose generator
        # needed the state of `staleness` iterations earlier. Generators that take turns may be `turns` further behind.
        behind = self._run.config.run.staleness + self._roles.turns + 1
        content = pack(message)
        for generator in self._living():
            with self._detecting_loss(generator):
                self._post.post(content, generator, behind)

    def _living(self) -> list[int]:
        every = range(self._roles.trainers, self._roles.trainers + self._roles.generators)
        return [generator for generator in every if generator not in self._lost]

    @contextmanager
    def _detecting_loss(self, generator: int) -> Iterator[None]:
        """Record that the generator has ended if a message inside this context fails."""
        try:
            yield
        except RuntimeError as error:
            self._lost.add(generator)
            LOGGER.warning(LOST, generator, " ".join(str(error).split())[:160])
