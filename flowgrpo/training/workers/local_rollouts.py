"""Rollouts by the model on this process."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext

from flowgrpo.training.run.phases import phase
from flowgrpo.training.scoring.rollout_batch import Batch, Made
from flowgrpo.training.state import RunState
from flowgrpo.training.wing import Rollout


class LocalRollouts:
    """Rollouts of this process's share of each iteration, made on request."""

    def __init__(self, run: RunState, rollout: Rollout):
        self._run, self._rollout = run, rollout

    def next(self, iteration: int) -> Made:
        """Roll out this process's share of an iteration, with the weights that `run.staleness` asks for."""
        run = self._run
        started, evaluations = time.perf_counter(), run.evaluations
        with phase("rollout"), run.versions.rolling_out(iteration):
            batch = self._rollout(iteration, run.groups(iteration))
            if run.config.prompts.pick.second_stage is not None:
                batch = self._add_second_stage(iteration, batch)
        return Made(batch, run.evaluations - evaluations, time.perf_counter() - started)

    def _add_second_stage(self, iteration: int, batch: Batch) -> Batch:
        """Return the batch with further samples of hard groups; a process without any of them samples none."""
        groups = self._run.second_stage(batch.groups, batch.outcomes)
        further = self._rollout(iteration, groups) if self._run.assignment(iteration, groups).own else None
        return batch.join(groups, further)

    def closing(self) -> AbstractContextManager[None]:
        """Return an empty context, since there are no generators to end."""
        return nullcontext()
