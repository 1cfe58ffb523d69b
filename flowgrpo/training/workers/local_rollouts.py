"""Rollouts by this process's own model."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext

from flowgrpo.training.run.phases import phase
from flowgrpo.training.scoring.rollout_batch import Made
from flowgrpo.training.state import RunState
from flowgrpo.training.wing import Rollout


class LocalRollouts:
    """This process's share of each iteration, rolled out when it is asked for."""

    def __init__(self, run: RunState, rollout: Rollout):
        self._run, self._rollout = run, rollout

    def next(self, iteration: int) -> Made:
        """Roll out this process's share of an iteration, by the version of the weights that it is due."""
        run = self._run
        started, evaluations = time.perf_counter(), run.evaluations
        with phase("rollout"), run.versions.rolling_out(iteration):
            batch = self._rollout(iteration, run.groups(iteration))
        return Made(batch, run.evaluations - evaluations, time.perf_counter() - started)

    def ended(self) -> AbstractContextManager[None]:
        """Return a context that ends with the run: nobody else has to be told."""
        return nullcontext()
