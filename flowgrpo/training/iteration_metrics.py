"""The metric line of an iteration."""

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
    """Return what the optimizer steps of an iteration did to the policy, over all processes."""
    rate = float(run.optimizer.param_groups[0]["lr"])
    return metrics.of_policy(stats, run.collectives.gather_shares) | {"policy/learning_rate": rate}


def of_iteration(
    run: RunState,
    made: Made,
    compared: Compared,
    stats: Sequence[UpdateStats],
    *,
    moved: dict[str, Any],
    started: float,
    rolled_out: float,
    evaluations: int,
) -> dict[str, Any]:
    """Return the metrics of an iteration, over all processes.

    Args:
        moved: of `of_policy`.
        started, rolled_out: when the iteration began, and when its samples were there, by `time.perf_counter`.
        evaluations: of the model on this process, before the update.
    """
    batch, updated = made.batch, run.evaluations - evaluations
    counts = {
        "cost/model_evaluations": made.evaluations + updated,
        "cost/rollout_evaluations": made.evaluations,
        "cost/update_evaluations": updated,
        "cost/trained_edges": sum(each.edges for each in stats),
        "cost/decoded": batch.decoded,
    }
    return {
        **compared.line,
        **run.collectives.totals(batch.counts),
        **moved,
        **run.collectives.totals(counts),
        "time/rollout": rolled_out - started,
        "time/reward": batch.scores.seconds,
        **({"time/generate": made.seconds} if run.roles.generators else {}),
        "time/update": time.perf_counter() - rolled_out,
        "memory/peak_bytes": peak_bytes(run.accelerator.device),
    }
