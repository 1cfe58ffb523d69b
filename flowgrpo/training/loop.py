"""The training loop of every kind of model, in `Loop.run` and `Loop.iterate`:

rollout -> units -> advantages -> optimizer steps -> log -> evaluate -> checkpoint

The loop fixes this order and knows no model. A wing (`training.wing`) supplies the functions of one kind of model:
`flow.trainer` for images, videos and sounds, `mdlm.trainer` for texts. `training.assembly` puts loop and wing together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from flowgrpo.training import comparison, iteration_metrics
from flowgrpo.training.checkpoints.run_checkpoints import RunCheckpoints
from flowgrpo.training.fitting.batch_sizes import BatchSizes
from flowgrpo.training.out_of_memory_retry import ModelCalls, name_sizes
from flowgrpo.training.reports import learning_signal, tree_store
from flowgrpo.training.run import stop_reasons
from flowgrpo.training.run.background import Background
from flowgrpo.training.run.phases import phase
from flowgrpo.training.scoring.rollout_batch import Rollouts
from flowgrpo.training.state import RunState
from flowgrpo.training.wing import Wing
from flowgrpo.training.workers.async_evaluation import AsyncEvaluation


@dataclass(kw_only=True)
class Loop:
    """The iterations of a run."""

    state: RunState  # the state that the parts of the loop share
    wing: Wing
    calls: ModelCalls  # the wing's functions that call the model, retried when memory runs out
    rollouts: Rollouts
    evaluation: AsyncEvaluation  # evaluates the held-out prompts, on this process or on evaluators
    checkpoints: RunCheckpoints
    batch_sizes: BatchSizes
    background: Background  # writes files while the next iteration runs; `run` waits for it and raises its errors
    trees: tree_store.TreeFolder
    worker: Callable[[], None] | None = None  # the work of a generator or an evaluator; None on a process that trains

    def run(self) -> None:
        """Train to the last iteration.

        Raises:
            Interrupted: Ctrl-C or SIGTERM came before the last iteration. The iteration under way was finished and
                saved.
            InputError: not even one row fits into memory, or the stored batch sizes of a resumed run cannot be read.
            OutOfMemory: memory ran out.
            EngineLost: an engine failed to roll out. A checkpoint was written if any iteration was finished.
            NothingToLearn: the last `run.patience` iterations, or all iterations of the run, had no advantage or no
                update. A checkpoint was written.
            Diverged: a checkpoint was due, but it was not written since the weights are not finite.
            Broken: all iterations are done, but the last samples have no rewards, or the last iteration learnt nothing.
        """
        state, graphs = self.state, self.wing.kept_graphs
        with self.wing.session(), state.report, self.background, name_sizes(self.batch_sizes, graphs):
            state.report.start(state.done)
            self.checkpoints.announce()
            self._warn_of_slow_average()
            self.batch_sizes.prepare()
            self.wing.settle()
            if self.worker is not None:
                with stop_reasons.stop_requests():  # the processes that train decide when to stop
                    return self.worker()
            saved = self.checkpoints.save_on(stop_reasons.EngineLost)
            with self.rollouts.closing(), self.evaluation.closing(), saved:
                self.wing.start(self.calls.rollout, self.batch_sizes.to_come)
                if state.done == 0:
                    self.evaluate()
                    self.checkpoints.mark_start()
                # Ctrl-C before this line ends the run at once: there is nothing to save yet.
                with stop_reasons.stop_requests() as stop:
                    self._iterations(stop)
                    self.background.wait()  # inside, so that a SIGTERM does not interrupt the writing
                self._check_end()

    def iterate(self) -> dict[str, Any]:
        """Run one iteration and return its metrics."""
        state, watch = self.state, iteration_metrics.Stopwatch()
        state.versions.keep(state.done, state.prompt_stats.state())  # later rollouts may use this policy
        # Samples, decoded and scored: sampled here, by generators or by an engine, or read from stored groups.
        rollout = self.rollouts.next(state.done)
        watch.lap(state)
        # Units are trajectories, branches or gains of steps. Their advantages compare all processes.
        compared = comparison.compare(state, self.wing, self.wing.units(rollout.batch), rollout.batch)
        with phase("update"):
            minibatches = self.calls.minibatches(rollout.batch, compared)
            minibatches.prepare()
            self._record(minibatches.tree_records())
            stats = [minibatches.step(number) for number in range(len(minibatches))]
        moved = iteration_metrics.of_policy(state, stats)
        state.prompt_stats.move(moved["policy/mean_abs_log_ratio"])
        self.wing.after_update(moved)  # older policies follow, the KL coefficient adapts
        return iteration_metrics.of_iteration(state, rollout, compared, stats, moved=moved, watch=watch)

    def evaluate(self) -> None:
        """Sample the held-out prompts with the averaged weights and score the samples, or have evaluators do so."""
        if self.state.eval_prompts:
            self.evaluation.evaluate()

    def _iterations(self, stop: stop_reasons.StopRequest) -> None:
        """Run iterations until the last one, or until something stops the run; see `run`."""
        state, train, run = self.state, self.state.config.train, self.state.config.run
        empty = 0  # iterations in a row without anything to learn
        while state.done < train.iterations:
            line = self.iterate()
            state.done += 1
            state.report.write({"step": state.done, "phase": "train", **line})
            empty = empty + 1 if learning_signal.is_idle(line) else 0
            if empty:
                state.report.warn(f"step {state.done}: nothing to learn, {learning_signal.why(line)}")
            last, out_of_patience = state.done == train.iterations, empty == run.patience
            if state.done % state.config.eval.every == 0 or last:
                self.evaluate()
            stopping = bool(state.collectives.sum(torch.tensor(float(stop.is_set))) > 0)
            if state.done % run.checkpoint.every == 0 or last or stopping or out_of_patience:
                self.checkpoints.save()
            if out_of_patience:
                reason = f"nothing to learn since step {state.done - empty}, {learning_signal.why(line)}"
                raise stop_reasons.NothingToLearn(
                    f"stopped after step {state.done}: {reason}", self.checkpoints.describe_rest()
                )
            if stopping and not last:
                raise stop_reasons.Interrupted(f"interrupted after step {state.done}", self.checkpoints.describe_rest())

    def _check_end(self) -> None:
        """Raise NothingToLearn or Broken if a run finished all its iterations without learning; see `run`."""
        state, lines, patience = self.state, self.state.report.lines, self.state.config.run.patience
        verdicts = learning_signal.never_learnt(lines, patience), learning_signal.broken(lines, patience)
        (never, broken), *_ = state.collectives.gather([verdicts])  # only the first process has all lines
        if never is not None:
            raise stop_reasons.NothingToLearn(
                f"ended after step {state.done}: {never}", *self.checkpoints.advise_new_run()
            )
        if broken is not None:
            raise stop_reasons.Broken(
                f"ended after step {state.done}: {broken}", *self.checkpoints.advise_after_damage()
            )

    def _record(self, parts: Sequence[tree_store.KeptTree]) -> None:
        state, asked = self.state, self.state.config.run.trees
        if asked is None or not asked.due(state.done, state.config.train.iterations):
            return
        everyone = state.collectives.gather_shards(list(parts))
        if state.accelerator.is_main_process:
            self.background.submit(partial(self.trees.write, everyone))

    def _warn_of_slow_average(self) -> None:
        train = self.state.config.train
        if train.ema is not None and train.ema.every > (steps := train.iterations * train.steps):
            self.state.report.warn(
                "train.ema.every: the average of the weights, which evaluation, gallery and export use, moves after "
                f"{train.ema.every} optimizer steps, but the run has {steps}; take {steps} or fewer"
            )
