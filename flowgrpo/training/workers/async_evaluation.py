"""Held-out evaluations of a run: on the spot, or beside the training (`run.evaluators`).

Beside it some processes only evaluate. The first process that trains sends them the averaged weights and goes on; they deal
the held-out prompts among themselves, and the first of them sends the samples and their metric line back, which the
background thread there waits for. What is sampled depends on the weights and the seeds alone, so that the numbers are those
of a run that evaluates itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from torch import distributed

from flowgrpo.schema.sections import RunConfig
from flowgrpo.training.advantages.reward_combination import Combination
from flowgrpo.training.checkpoints import checkpoint
from flowgrpo.training.distributed.channel import PATIENCE, Channel, End, packed
from flowgrpo.training.distributed.collectives import Collectives
from flowgrpo.training.distributed.worker_roles import Roles
from flowgrpo.training.fitting.batch_sizes import ROLLOUT
from flowgrpo.training.fitting.oom_retry import Retrying
from flowgrpo.training.reports import metrics, trackers
from flowgrpo.training.reports.report import Report
from flowgrpo.training.reports.reward_hacking import overoptimized
from flowgrpo.training.reports.samples import Sample, SampleFolder
from flowgrpo.training.run import random_states
from flowgrpo.training.run.background import Background
from flowgrpo.training.run.stop_reasons import Lost, Stopped
from flowgrpo.training.weights.trained_weights import Weights
from rewards import Reward


@dataclass(frozen=True)
class Evaluation:
    """Held-out samples, and their line of metrics, whose `step` says after how many iterations they were made."""

    line: dict[str, Any]
    samples: list[Sample]


@dataclass(frozen=True)
class Question:
    """The weights to evaluate, in the order of `Weights.parameters`, after so many iterations."""

    step: int
    weights: list[torch.Tensor]


class Evaluated(Protocol):
    """What a process evaluates, with what and where to, as `Loop` has it; see there."""

    accelerator: Accelerator
    config: RunConfig
    weights: Weights
    rewards: list[Reward]
    eval_rewards: list[Reward]
    combination: Combination
    collectives: Collectives
    background: Background
    report: Report
    samples: SampleFolder
    folder: Path
    checkpoints: Path
    retrying: Retrying
    after_evaluation: Callable[[Path], object]
    done: int

    @property
    def evaluations(self) -> int:
        """Model evaluations of this process so far."""

    def eval_samples(self) -> list[Sample]:
        """Sample each held-out prompt with the weights as they are."""


class AsyncEvaluation:
    """The evaluations of a run, as one of its processes meets them; all processes must make theirs together.

    Args:
        loop: of this process.

    Attributes:
        evaluates: whether this process only evaluates.
    """

    def __init__(self, loop: Evaluated, roles: Roles):
        self._loop, self._rank, self._ranks = loop, loop.accelerator.process_index, roles.ranks_of_evaluators
        self.evaluates = roles.evaluates(self._rank)
        if self._ranks:  # a thread waits for answers while questions are sent, so each way has a group of its own
            self._questions, self._answers = (Channel(loop.accelerator.device) for _ in range(2))
            self._trainers = distributed.new_group(range(roles.trainers), backend="gloo", timeout=PATIENCE)

    def evaluate(self) -> None:
        """Evaluate the averaged weights, or have them evaluated; only the latter goes on before there are samples."""
        loop = self._loop
        with loop.weights.averaged():
            if self._ranks:
                if self._rank == 0:
                    self._ask()
                    loop.background.submit(self._answered)
                # the first may wait longer than a GPU's group does
                distributed.barrier(group=self._trainers)  # type: ignore[arg-type]  # torch's stubs: not of new_group
                return
            with random_states.random_state_kept():  # how often one looks must not change what is trained
                found = self._evaluation()
        self._tell(found)
        if self._rank == 0:
            loop.background.submit(partial(self._show, found))

    def serve(self) -> None:
        """Evaluate what is sent, until those that train end.

        Raises:
            Stopped: they were stopped.
        """
        while not isinstance(asked := self._questions.unpacked(self._questions.receive(0)), End):
            self._loop.weights.put(asked.weights)
            self._loop.done = asked.step
            found = self._evaluation()
            if self._rank == self._ranks[0]:
                self._answers.send(found, 0)
        asked.raised()

    @contextmanager
    def ended(self) -> Iterator[None]:
        """Wait for all evaluations when this context ends, and let the evaluators end."""
        stopped, loop = None, self._loop
        try:
            yield
            if self._ranks:
                loop.background.wait()
        except Stopped as error:
            stopped = error
        if isinstance(stopped, Lost):
            with suppress(Lost):
                loop.background.wait()  # a checkpoint may be under way
            stopped.rest = checkpoint.rest(loop.checkpoints, loop.done)
        elif self._ranks and self._rank == 0:
            self._post(End(stopped), behind=0)
        if stopped is not None:
            raise stopped

    def _evaluation(self) -> Evaluation:
        """Sample with the weights as they are, together with all processes that do."""
        loop = self._loop
        started, evaluations = time.perf_counter(), loop.evaluations
        samples = loop.retrying.attempt(ROLLOUT, loop.eval_samples, within=False)
        line = {
            "step": loop.done,
            "phase": "eval",
            **metrics.of_samples(samples, loop.combination, loop.rewards, loop.eval_rewards),
            **loop.collectives.totals({"cost/model_evaluations": loop.evaluations - evaluations}),
            "cost/decoded": len(samples),
            "time/eval": time.perf_counter() - started,
        }
        return Evaluation(line, samples)

    def _answered(self) -> None:
        """Wait for what the evaluators make of the weights that they were sent first, and keep it."""
        with self._noticing(self._ranks[0]):
            content = self._answers.receive(self._ranks[0])
        found = self._answers.unpacked(content)
        self._tell(found)
        self._show(found)

    def _tell(self, found: Evaluation) -> None:
        loop = self._loop
        loop.report.write(found.line)
        watched = [reward.name for reward in loop.eval_rewards]
        for sentence in overoptimized(loop.report.lines, watched, loop.config.eval.watch):
            loop.report.warn(sentence)
        trackers.log_pictures(loop.accelerator, found.samples, found.line["step"], newest=loop.report.newest)

    def _show(self, found: Evaluation) -> None:
        self._loop.samples.write(found.samples, found.line["step"])
        self._loop.after_evaluation(self._loop.folder)

    def _ask(self) -> None:
        """Send the weights as they are; waits only while an evaluator has not taken the ones before."""
        weights = [p.detach().cpu() for p in self._loop.weights.parameters]
        self._post(Question(self._loop.done, weights), behind=1)

    def _post(self, message: Question | End, behind: int) -> None:
        content = packed(message)
        for rank in self._ranks:
            with self._noticing(rank):
                self._questions.post(content, rank, behind)

    @contextmanager
    def _noticing(self, evaluator: int) -> Iterator[None]:
        """Within it only messages go to and fro: that one fails tells that the evaluator has ended."""
        try:
            yield
        except RuntimeError as error:
            said = f"process {evaluator}, which evaluated, has ended ({' '.join(str(error).split())[:160]})"
            raise Lost(f"stopped, {said}", "") from error  # `ended` says what is left, once it is written
