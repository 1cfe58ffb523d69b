"""The training loop of every kind of model, in `Loop.run` and `Loop.iterate`:

rollout -> units -> advantages -> optimizer steps -> log -> evaluate -> checkpoint

The loop owns this order and knows no model. A wing (`training.wing`) supplies the functions of one: `flow.trainer` for
images, videos and sounds, `mdlm.trainer` for texts. `training.assembly` puts both together.
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
from flowgrpo.training.oom_retry import ModelCalls, name_sizes
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
    """The order of a run's iterations.

    Attributes:
        state: what the parts of the loop share.
        wing: the kind of model.
        calls: the wing's functions that call its model, retried where memory runs out.
        rollouts: where samples come from.
        evaluation: of the held-out prompts, here or on processes beside.
        background: writes what the next iteration need not wait for; empty, and its errors raised, when `run` returns.
        worker: what this process does in place of training: generate or evaluate; None where it trains.
    """

    state: RunState
    wing: Wing
    calls: ModelCalls
    rollouts: Rollouts
    evaluation: AsyncEvaluation
    checkpoints: RunCheckpoints
    batch_sizes: BatchSizes
    background: Background
    trees: tree_store.TreeFolder
    worker: Callable[[], None] | None = None

    def run(self) -> None:
        """Train to the last iteration.

        Raises:
            Interrupted: Ctrl-C or SIGTERM came before the last iteration; the one under way was finished, and saved.
            InputError: not even one row fits into memory, or the found batch sizes of a resumed run cannot be read.
            OutOfMemory: memory ran out.
            EngineLost: an engine did not roll out; a checkpoint was written if an iteration is finished.
            NothingToLearn: the last `run.patience` iterations, or all there are, had no advantage or no update; a checkpoint
                was written.
            Diverged: a checkpoint was due, and the weights are not finite; none was written.
            Broken: all iterations are done, and the last samples have no rewards, or could not be learnt from.
        """
        state, graphs = self.state, self.wing.kept_graphs
        with self.wing.session(), state.report, self.background, name_sizes(self.batch_sizes, graphs):
            state.report.start(state.done)
            self.checkpoints.announce()
            self._warn_of_slow_average()
            self.batch_sizes.prepare()
            if self.worker is not None:
                with stop_reasons.stop_requests():  # those that train decide
                    return self.worker()
            saved = self.checkpoints.save_on(stop_reasons.EngineLost)
            with self.rollouts.ended(), self.evaluation.ended(), saved:
                self.wing.start(self.calls.rollout, self.batch_sizes.to_come)
                if state.done == 0:
                    self.evaluate()
                    self.checkpoints.mark_start()
                with stop_reasons.stop_requests() as stop:  # before, there is nothing to save; Ctrl-C ends at once
                    self._iterations(stop)
                    self.background.wait()  # here, too, a SIGTERM does not break what is being written
                self._check_end()

    def iterate(self) -> dict[str, Any]:
        """Run one iteration and return its metrics."""
        state, watch = self.state, iteration_metrics.Stopwatch()
        state.versions.keep(state.done, state.prompt_stats.state())  # the policy that later rollouts may need
        # Sampled here, by generators or by an engine, or stored; decoded and scored.
        rollout = self.rollouts.next(state.done)
        watch.lap(state)
        # Trajectories, branches or gains of steps, and their advantages over all processes.
        compared = comparison.compare(state, self.wing, self.wing.units(rollout.batch), rollout.batch)
        with phase("update"):
            minibatches = self.calls.minibatches(rollout.batch, compared)
            minibatches.prepare()
            self._record(minibatches.tree_records())
            stats = [minibatches.step(number) for number in range(len(minibatches))]
        moved = iteration_metrics.of_policy(state, stats)
        self.wing.after_update(moved)  # older policies follow, the KL coefficient adapts
        return iteration_metrics.of_iteration(state, rollout, compared, stats, moved=moved, watch=watch)

    def evaluate(self) -> None:
        """Have the held-out prompts sampled with the averaged weights, and scored."""
        if self.state.eval_prompts:
            self.evaluation.evaluate()

    def _iterations(self, stop: stop_reasons.StopRequest) -> None:
        """Take iterations until the last one, or until something stops the run; see `run`."""
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
        """End a run badly that took all its iterations and has nothing to show for it; see `run`."""
        state, lines, patience = self.state, self.state.report.lines, self.state.config.run.patience
        verdicts = learning_signal.never_learnt(lines, patience), learning_signal.broken(lines, patience)
        (never, broken), *_ = state.collectives.gather([verdicts])  # the first process has all lines
        if never is not None:
            raise stop_reasons.NothingToLearn(
                f"ended after step {state.done}: {never}", *self.checkpoints.advise_new_run()
            )
        if broken is not None:
            raise stop_reasons.Broken(
                f"ended after step {state.done}: {broken}", *self.checkpoints.advise_after_damage()
            )

    def _record(self, parts: Sequence[tree_store.KeptTree]) -> None:
        """Write the trees of an iteration that is due, in the background, from the parts of all processes."""
        state, asked = self.state, self.state.config.run.trees
        if asked is None or not asked.due(state.done, state.config.train.iterations):
            return
        everyone = state.collectives.gather_shares(list(parts))
        if state.accelerator.is_main_process:
            self.background.submit(partial(self.trees.write, everyone))

    def _warn_of_slow_average(self) -> None:
        train = self.state.config.train
        if train.ema is not None and train.ema.every > (steps := train.iterations * train.steps):
            self.state.report.warn(
                "train.ema.every: the average of the weights, which evaluation, gallery and export use, moves after "
                f"{train.ema.every} optimizer steps, but the run has {steps}; take {steps} or fewer"
            )
