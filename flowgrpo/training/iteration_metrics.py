"""The metrics of an iteration, one line of the metrics file."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from flowgrpo.training.reports import metrics
from flowgrpo.training.reports.report import peak_bytes
from flowgrpo.training.scoring.rollout_batch import Made
from flowgrpo.training.state import RunState
from flowgrpo.training.weights.optimizer_step import UpdateStats
from flowgrpo.training.wing import Compared


def of_policy(run: RunState, stats: Sequence[UpdateStats]) -> dict[str, Any]:
    """Return the `policy/*` metrics of an iteration's optimizer steps, over all processes."""
    rate = float(run.optimizer.param_groups[0]["lr"])
    return metrics.of_policy(stats, run.collectives.gather_shards) | {"policy/learning_rate": rate}


class Stopwatch:
    """Start time of an iteration, end time of its rollout, and the numbers of model evaluations at the rollout's end."""

    def __init__(self) -> None:
        self.started = self.rolled_out = time.perf_counter()
        self.evaluations = self.backward = 0

    def lap(self, run: RunState) -> None:
        """Note the end of the rollout."""
        self.rolled_out, self.evaluations, self.backward = time.perf_counter(), run.evaluations, run.backward.count


def of_iteration(
    run: RunState,
    rollout: Made,
    compared: Compared,
    stats: Sequence[UpdateStats],
    *,
    moved: dict[str, Any],
    watch: Stopwatch,
) -> dict[str, Any]:
    """Return the metrics of an iteration: counts over all processes, times and peak memory of this process."""
    batch, updated = rollout.batch, run.evaluations - watch.evaluations
    counts = {
        "cost/model_evaluations": rollout.evaluations + updated,
        "cost/rollout_evaluations": rollout.evaluations,
        "cost/update_evaluations": updated,
        "cost/backward_evaluations": run.backward.count - watch.backward,
        "cost/trained_edges": sum(each.edges for each in stats),
        "cost/decoded": batch.decoded,
    }
    return {
        **compared.line,
        **run.collectives.totals(batch.counts),
        **moved,
        **run.collectives.totals(counts),
        "time/rollout": watch.rolled_out - watch.started,
        "time/reward": batch.scores.seconds,
        **({"time/generate": rollout.seconds} if run.roles.generators else {}),
        "time/update": time.perf_counter() - watch.rolled_out,
        "memory/peak_bytes": peak_bytes(run.accelerator.device),
    }
