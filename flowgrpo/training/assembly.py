"""Assembly of the training loop from a wing (one kind of model) and the parts that all kinds share."""

from __future__ import annotations

from flowgrpo.training.checkpoints.run_checkpoints import RunCheckpoints
from flowgrpo.training.fitting.batch_sizes import BatchSizes
from flowgrpo.training.loop import Loop
from flowgrpo.training.out_of_memory_retry import Retry, guard_calls
from flowgrpo.training.reports.samples import FRAME_RATE, SampleFolder
from flowgrpo.training.reports.tree_store import TreeFolder
from flowgrpo.training.run.background import Background
from flowgrpo.training.state import RunState
from flowgrpo.training.wing import Wing
from flowgrpo.training.workers.async_evaluation import AsyncEvaluation
from flowgrpo.training.workers.async_rollout import AsyncRollout
from flowgrpo.training.workers.local_rollouts import LocalRollouts


def build_loop(run: RunState, wing: Wing, *, frame_rate: float = FRAME_RATE) -> Loop:
    """Build the training loop of a run; `frame_rate` is that of saved videos. All processes must call it together."""
    batch_sizes = BatchSizes(run, wing.probe_calls, wing.copies_to_come)
    calls = guard_calls(wing, Retry(run, batch_sizes))
    background, samples, trees = Background(), SampleFolder(run.folder, frame_rate), TreeFolder(run.folder)
    local = LocalRollouts(run, calls.rollout)
    evaluation = AsyncEvaluation(run, calls.eval_samples, background=background, samples=samples)
    ahead = AsyncRollout(run, wing, local) if run.roles.generators else None
    rank, worker = run.accelerator.process_index, None
    if run.roles.evaluates(rank):
        worker = evaluation.serve
    elif ahead is not None and run.roles.generates(rank):
        worker = ahead.generate
    return Loop(
        state=run,
        wing=wing,
        calls=calls,
        rollouts=local if ahead is None else ahead,
        evaluation=evaluation,
        checkpoints=RunCheckpoints(run, wing, background=background, samples=samples, trees=trees),
        batch_sizes=batch_sizes,
        background=background,
        trees=trees,
        worker=worker,
    )
