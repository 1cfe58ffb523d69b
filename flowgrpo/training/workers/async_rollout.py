"""Rollouts ahead (`run.generators`): some processes only roll out, with the weights of `run.staleness` iterations before.

Before each iteration the first process that trains sends what stands to every generator, and each that trains receives its
samples, which a generator has made meanwhile. The distance is fixed and noise is addressed, so that the numbers are those of
a run in which the processes that train roll out themselves, and a resume makes what was under way anew.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from torch import distributed

from flowgrpo.schema.sections import RunConfig
from flowgrpo.training.advantages.prompt_statistics import PromptStats
from flowgrpo.training.distributed.channel import PATIENCE, Channel, End, packed
from flowgrpo.training.distributed.data_share import DataShard
from flowgrpo.training.distributed.worker_roles import Roles
from flowgrpo.training.run.phases import phase
from flowgrpo.training.run.stop_reasons import Stopped
from flowgrpo.training.scoring.rollout_batch import Made
from flowgrpo.training.weights.policy_versions import Versions
from flowgrpo.training.weights.trained_weights import Weights

LOGGER = logging.getLogger(__name__)
LOST = "process %d, which generated, has ended (%s); those that train make its samples from here on"


@dataclass(frozen=True)
class Stand:
    """What stands before an iteration: what a generator must know to roll out as a process that trains would.

    Attributes:
        weights: the trained tensors, in the order of `Weights.parameters`.
        prompt_stats: see `PromptStats.state`.
        own: what a kind adds, see `Loop.rollout_state`.
    """

    iteration: int
    weights: list[torch.Tensor]
    prompt_stats: dict[str, Any]
    own: Any


class Rolling(Protocol):
    """What a process rolls out with, as `Loop` has it; see there."""

    accelerator: Accelerator
    config: RunConfig
    weights: Weights
    versions: Versions
    prompt_stats: PromptStats
    shares: Sequence[DataShard]
    share: DataShard
    done: int

    def made(self, iteration: int) -> Made:
        """Roll out this process's share of an iteration."""

    def rollout_state(self) -> Any:
        """What a rollout depends on, beside the weights and the prompt stats."""

    def take_rollout_state(self, state: Any) -> None:
        """Take over what `rollout_state` returned elsewhere."""


class AsyncRollout:
    """The generators of a run, as one of its processes meets them; all processes must make theirs together.

    Args:
        loop: of this process.

    Attributes:
        generates: whether this process is one of them.
    """

    def __init__(self, loop: Rolling, roles: Roles):
        self._loop, self._roles, self._rank = loop, roles, loop.accelerator.process_index
        self.generates = roles.generates(self._rank)
        self._post, self._lost = Channel(loop.accelerator.device), set[int]()
        self._trainers = distributed.new_group(range(roles.trainers), backend="gloo", timeout=PATIENCE)

    def received(self, iteration: int) -> Made | None:
        """Send what stands before an iteration, and return this process's samples; None if it must make them itself."""
        if self._rank == 0:
            loop = self._loop
            weights = [p.detach().cpu() for p in loop.weights.parameters]
            self._tell(Stand(iteration, weights, loop.prompt_stats.state(), loop.rollout_state()))
        made = self._from_generator(iteration)
        # others may wait longer than a GPU's group does
        distributed.barrier(group=self._trainers)  # type: ignore[arg-type]  # torch's stubs: not what new_group returns
        return made

    @contextmanager
    def ended(self) -> Iterator[None]:
        """Let the generators end when this context does; what they have made ahead is received, and thrown away."""
        stopped = None
        try:
            yield
        except Stopped as error:
            stopped = error
        if not self.generates:
            loop = self._loop
            ahead = loop.done + loop.config.run.staleness
            for iteration in range(loop.done, min(ahead, loop.config.train.iterations)):
                self._from_generator(iteration)
            if self._rank == 0:
                self._tell(End(stopped))
                for generator in self._living():
                    with self._noticing(generator):
                        self._post.flush(generator)
        if stopped is not None:
            raise stopped

    def generate(self) -> None:
        """Roll out for those that train, until they end.

        Raises:
            Stopped: they were stopped.
        """
        loop, behind, stands = self._loop, self._loop.config.run.staleness, -1
        for iteration in range(loop.done, loop.config.train.iterations):
            for hand in self._roles.hands(self._rank, iteration):
                while stands < max(loop.done, iteration - behind):
                    message = self._post.unpacked(self._post.receive(0))
                    if isinstance(message, End):
                        return message.raised()
                    stands = self._take(message)
                loop.share = next(share for share in loop.shares if share.index == hand)
                with phase("rollout"):
                    made = loop.made(iteration)
                self._post.send(made, hand)
        while not isinstance(message := self._post.unpacked(self._post.receive(0)), End):
            pass
        return message.raised()

    def _take(self, stand: Stand) -> int:
        """Put what stands in place; return before which iteration it does."""
        loop = self._loop
        loop.weights.put(stand.weights)
        loop.prompt_stats.restore(stand.prompt_stats)
        loop.take_rollout_state(stand.own)
        loop.versions.keep(stand.iteration, stand.prompt_stats)
        return stand.iteration

    def _from_generator(self, iteration: int) -> Made | None:
        """What a generator has made for this process; None of one that has ended."""
        generator, content = self._roles.generator(self._rank, iteration), None
        if generator not in self._lost:
            with self._noticing(generator):
                content = self._post.receive(generator)
        return None if content is None else self._post.unpacked(content)

    def _tell(self, message: Stand | End) -> None:
        # The generator of the iteration before has received what stood so many iterations before that; the others earlier.
        behind = self._loop.config.run.staleness + self._roles.turns + 1
        content = packed(message)
        for generator in self._living():
            with self._noticing(generator):
                self._post.post(content, generator, behind)

    def _living(self) -> list[int]:
        every = range(self._roles.trainers, self._roles.trainers + self._roles.generators)
        return [generator for generator in every if generator not in self._lost]

    @contextmanager
    def _noticing(self, generator: int) -> Iterator[None]:
        """Within it only messages go to and fro: that one fails tells that the generator has ended."""
        try:
            yield
        except RuntimeError as error:
            self._lost.add(generator)
            LOGGER.warning(LOST, generator, " ".join(str(error).split())[:160])
