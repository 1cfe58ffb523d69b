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
from typing import Any

import torch
from torch import distributed

from flowgrpo.training.checkpoints import checkpoint
from flowgrpo.training.distributed.channel import PATIENCE, Channel, End, packed
from flowgrpo.training.reports import metrics, trackers
from flowgrpo.training.reports.reward_hacking import overoptimized
from flowgrpo.training.reports.samples import Sample, SampleFolder
from flowgrpo.training.run import random_states
from flowgrpo.training.run.background import Background
from flowgrpo.training.run.stop_reasons import Lost, Stopped
from flowgrpo.training.state import RunState


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


class AsyncEvaluation:
    """The evaluations of a run; all processes construct theirs together.

    Args:
        eval_samples: samples each held-out prompt with the weights as they are.

    Attributes:
        samples: folder of the samples.
        after_evaluation: called with the run's folder, on the main process in the background, once samples are written.
    """

    def __init__(
        self, run: RunState, eval_samples: Callable[[], list[Sample]], *, background: Background, samples: SampleFolder
    ):
        self._run, self._eval_samples, self._background, self.samples = run, eval_samples, background, samples
        self._rank, self._ranks = run.accelerator.process_index, run.roles.ranks_of_evaluators
        self.after_evaluation: Callable[[Path], object] = lambda folder: None
        if self._ranks:  # a thread waits for answers while questions are sent, so each way has a group of its own
            self._questions, self._answers = (Channel(run.accelerator.device) for _ in range(2))
            self._trainers = distributed.new_group(range(run.roles.trainers), backend="gloo", timeout=PATIENCE)

    def evaluate(self) -> None:
        """Evaluate the averaged weights, or have them evaluated; only the latter goes on before there are samples."""
        with self._run.weights.averaged():
            if self._ranks:
                if self._rank == 0:
                    self._ask()
                    self._background.submit(self._answered)
                # the first may wait longer than a GPU's group does
                distributed.barrier(group=self._trainers)  # type: ignore[arg-type]  # torch's stubs: not of new_group
                return
            with random_states.preserve_random_state():  # how often one looks must not change what is trained
                found = self._evaluation()
        self._tell(found)
        if self._rank == 0:
            self._background.submit(partial(self._show, found))

    def serve(self) -> None:
        """Evaluate what is sent, until those that train end.

        Raises:
            Stopped: they were stopped.
        """
        while not isinstance(asked := self._questions.unpacked(self._questions.receive(0)), End):
            self._run.weights.put(asked.weights)
            self._run.done = asked.step
            found = self._evaluation()
            if self._rank == self._ranks[0]:
                self._answers.send(found, 0)
        asked.raised()

    @contextmanager
    def ended(self) -> Iterator[None]:
        """Wait for all evaluations when this context ends, and let the evaluators end."""
        stopped, run = None, self._run
        try:
            yield
            if self._ranks:
                self._background.wait()
        except Stopped as error:
            stopped = error
        if isinstance(stopped, Lost):
            with suppress(Lost):
                self._background.wait()  # a checkpoint may be under way
            stopped.rest = checkpoint.describe_rest(run.checkpoint_folder, run.done)
        elif self._ranks and self._rank == 0:
            self._post(End(stopped), behind=0)
        if stopped is not None:
            raise stopped

    def _evaluation(self) -> Evaluation:
        """Sample with the weights as they are, together with all processes that do."""
        run = self._run
        started, evaluations = time.perf_counter(), run.evaluations
        samples = self._eval_samples()
        line = {
            "step": run.done,
            "phase": "eval",
            **metrics.of_samples(samples, run.combination, run.rewards, run.eval_rewards),
            **run.collectives.totals({"cost/model_evaluations": run.evaluations - evaluations}),
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
        run = self._run
        run.report.write(found.line)
        watched = [reward.name for reward in run.eval_rewards]
        for sentence in overoptimized(run.report.lines, watched, run.config.eval.watch):
            run.report.warn(sentence)
        trackers.log_pictures(run.accelerator, found.samples, found.line["step"], newest=run.report.newest)

    def _show(self, found: Evaluation) -> None:
        self.samples.write(found.samples, found.line["step"])
        self.after_evaluation(self._run.folder)

    def _ask(self) -> None:
        """Send the weights as they are; waits only while an evaluator has not taken the ones before."""
        weights = [p.detach().cpu() for p in self._run.weights.parameters]
        self._post(Question(self._run.done, weights), behind=1)

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
