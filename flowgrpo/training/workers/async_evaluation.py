"""Held-out evaluations of a run, on the trainers or on evaluators (`run.evaluators`).

Evaluators only evaluate, and divide the held-out prompts among themselves. The first trainer sends them the averaged
weights and continues to train, while its background thread waits for the samples and their metric line. Samples depend
only on the weights and the seeds, so the metrics equal those of a run without evaluators.
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
from flowgrpo.training.distributed.channel import PATIENCE, Channel, End, pack
from flowgrpo.training.reports import metrics, trackers
from flowgrpo.training.reports.reward_hacking import find_overoptimized
from flowgrpo.training.reports.samples import Sample, SampleFolder
from flowgrpo.training.run import random_states
from flowgrpo.training.run.background import Background
from flowgrpo.training.run.stop_reasons import Lost, Stopped
from flowgrpo.training.state import RunState


@dataclass(frozen=True)
class Evaluation:
    """Held-out samples, and their metric line, whose `step` is the number of finished iterations."""

    line: dict[str, Any]
    samples: list[Sample]


@dataclass(frozen=True)
class Question:
    """A request to evaluate `weights`, in the order of `Weights.parameters`, which are those after `step` iterations."""

    step: int
    weights: list[torch.Tensor]


class AsyncEvaluation:
    """The evaluations of a run. The constructor is a collective call of all processes.

    `eval_samples` samples and scores each held-out prompt with the current weights. `after_evaluation` is called with
    the run's folder once samples are written, by a background job of the main process.
    """

    def __init__(
        self, run: RunState, eval_samples: Callable[[], list[Sample]], *, background: Background, samples: SampleFolder
    ):
        self._run, self._eval_samples, self._background, self.samples = run, eval_samples, background, samples
        self._rank, self._ranks = run.accelerator.process_index, run.roles.ranks_of_evaluators
        self.after_evaluation: Callable[[Path], object] = lambda folder: None
        if self._ranks:  # a thread waits for answers while questions are sent, so each direction has its own channel
            self._questions, self._answers = (Channel(run.accelerator.device) for _ in range(2))
            self._trainers = distributed.new_group(range(run.roles.trainers), backend="gloo", timeout=PATIENCE)

    def evaluate(self) -> None:
        """Evaluate the averaged weights and report the result; with evaluators, only send them the weights."""
        with self._run.weights.averaged():
            if self._ranks:
                if self._rank == 0:
                    self._send_weights()
                    self._background.submit(self._receive_result)
                # The first trainer may wait longer than NCCL's timeout, hence a group of its own.
                distributed.barrier(group=self._trainers)  # type: ignore[arg-type]  # torch's stubs: not of new_group
                return
            with random_states.preserve_random_state():  # evaluations must not change the training
                result = self._evaluate_weights()
        self._report(result)
        if self._rank == 0:
            self._background.submit(partial(self._write_samples, result))

    def serve(self) -> None:
        """Evaluate the weights that the first trainer sends, until training ends; raise Stopped if it was stopped."""
        while not isinstance(asked := self._questions.unpack(self._questions.receive(0)), End):
            self._run.weights.put(asked.weights)
            self._run.done = asked.step
            result = self._evaluate_weights()
            if self._rank == self._ranks[0]:
                self._answers.send(result, 0)
        asked.raise_if_stopped()

    @contextmanager
    def closing(self) -> Iterator[None]:
        """Return a context that waits for all evaluations at its exit, and then ends the evaluators."""
        stopped, run = None, self._run
        try:
            yield
            if self._ranks:
                self._background.wait()
        except Stopped as error:
            stopped = error
        if isinstance(stopped, Lost):
            with suppress(Lost):
                self._background.wait()  # a checkpoint may still be written
            stopped.rest = checkpoint.describe_rest(run.checkpoint_folder, run.done)
        elif self._ranks and self._rank == 0:
            self._post(End(stopped), behind=0)
        if stopped is not None:
            raise stopped

    def _evaluate_weights(self) -> Evaluation:
        """Evaluate the current weights; a collective call of all processes that evaluate."""
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

    def _receive_result(self) -> None:
        with self._detecting_loss(self._ranks[0]):
            content = self._answers.receive(self._ranks[0])
        result = self._answers.unpack(content)
        self._report(result)
        self._write_samples(result)

    def _report(self, result: Evaluation) -> None:
        run = self._run
        run.report.write(result.line)
        watched = [reward.name for reward in run.eval_rewards]
        for sentence in find_overoptimized(run.report.lines, watched, run.config.eval.watch):
            run.report.warn(sentence)
        trackers.log_pictures(run.accelerator, result.samples, result.line["step"], newest=run.report.newest)

    def _write_samples(self, result: Evaluation) -> None:
        self.samples.write(result.samples, result.line["step"])
        self.after_evaluation(self._run.folder)

    def _send_weights(self) -> None:
        """Send the current weights to the evaluators; wait only until they have received the previous ones."""
        weights = [p.detach().cpu() for p in self._run.weights.parameters]
        self._post(Question(self._run.done, weights), behind=1)

    def _post(self, message: Question | End, behind: int) -> None:
        content = pack(message)
        for rank in self._ranks:
            with self._detecting_loss(rank):
                self._questions.post(content, rank, behind)

    @contextmanager
    def _detecting_loss(self, evaluator: int) -> Iterator[None]:
        """Raise Lost if a message inside this context fails, which means that the evaluator has ended."""
        try:
            yield
        except RuntimeError as error:
            said = f"process {evaluator}, which evaluated, has ended ({' '.join(str(error).split())[:160]})"
            raise Lost(f"stopped, {said}", "") from error  # `ended` adds the checkpoint to resume from
