"""Rollouts ahead (`run.generators`): some processes only roll out, with the weights of `run.staleness` iterations before.

Before each iteration the first process that trains sends what stands to every generator, and each that trains receives its
samples, which a generator has made meanwhile. The distance is fixed and noise is addressed, so that the numbers are those of
a run in which the processes that train roll out themselves, and a resume makes what was under way anew.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed

from flowgrpo.training.distributed.channel import PATIENCE, Channel, End, packed
from flowgrpo.training.run.phases import phase
from flowgrpo.training.run.stop_reasons import Stopped
from flowgrpo.training.scoring.rollout_batch import Made
from flowgrpo.training.state import RunState
from flowgrpo.training.wing import Wing
from flowgrpo.training.workers.local_rollouts import LocalRollouts

LOGGER = logging.getLogger(__name__)
LOST = "process %d, which generated, has ended (%s); those that train make its samples from here on"


@dataclass(frozen=True)
class Stand:
    """What stands before an iteration: what a generator must know to roll out as a process that trains would.

    Attributes:
        weights: the trained tensors, in the order of `Weights.parameters`.
        prompt_stats: see `PromptStats.state`.
        own: what a kind adds, see `Wing.rollout_state`.
    """

    iteration: int
    weights: list[torch.Tensor]
    prompt_stats: dict[str, Any]
    own: Any


class AsyncRollout:
    """Rollouts by the generators of a run; all processes construct theirs together.

    Args:
        wing: whose state of rollouts generators must know.
        local: what a generator makes samples with, and a process that trains once its generator has ended.
    """

    def __init__(self, run: RunState, wing: Wing, local: LocalRollouts):
        self._run, self._wing, self._local = run, wing, local
        self._roles, self._rank = run.roles, run.accelerator.process_index
        self._post, self._lost = Channel(run.accelerator.device), set[int]()
        self._trainers = distributed.new_group(range(run.roles.trainers), backend="gloo", timeout=PATIENCE)

    def next(self, iteration: int) -> Made:
        """Send the state before an iteration to the generators, and return this process's samples of it."""
        if self._rank == 0:
            run = self._run
            weights = [p.detach().cpu() for p in run.weights.parameters]
            self._tell(Stand(iteration, weights, run.prompt_stats.state(), self._wing.rollout_state()))
        with phase("rollout"):
            made = self._from_generator(iteration)
            # others may wait longer than a GPU's group does
            distributed.barrier(group=self._trainers)  # type: ignore[arg-type]  # torch's stubs: not of new_group
        return made or self._local.next(iteration)

    @contextmanager
    def ended(self) -> Iterator[None]:
        """Let the generators end when this context does; what they have made ahead is received, and thrown away."""
        stopped = None
        try:
            yield
        except Stopped as error:
            stopped = error
        if not self._roles.generates(self._rank):
            run = self._run
            ahead = run.done + run.config.run.staleness
            for iteration in range(run.done, min(ahead, run.config.train.iterations)):
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
        run, behind, stands = self._run, self._run.config.run.staleness, -1
        for iteration in range(run.done, run.config.train.iterations):
            for hand in self._roles.hands(self._rank, iteration):
                while stands < max(run.done, iteration - behind):
                    message = self._post.unpacked(self._post.receive(0))
                    if isinstance(message, End):
                        return message.raised()
                    stands = self._take(message)
                run.share = next(share for share in run.shares if share.index == hand)
                self._post.send(self._local.next(iteration), hand)
        while not isinstance(message := self._post.unpacked(self._post.receive(0)), End):
            pass
        return message.raised()

    def _take(self, stand: Stand) -> int:
        """Put what stands in place; return before which iteration it does."""
        run = self._run
        run.weights.put(stand.weights)
        run.prompt_stats.restore(stand.prompt_stats)
        self._wing.restore_rollout_state(stand.own)
        run.versions.keep(stand.iteration, stand.prompt_stats)
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
        behind = self._run.config.run.staleness + self._roles.turns + 1
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
