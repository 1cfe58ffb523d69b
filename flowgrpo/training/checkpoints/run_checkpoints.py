"""Checkpoints of a run: write them in the background, and go back to one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from accelerate.utils import gather_object

from flowgrpo.errors import InputError
from flowgrpo.training.checkpoints import checkpoint, resume, snapshot
from flowgrpo.training.distributed import agreement
from flowgrpo.training.distributed.dtensors import local
from flowgrpo.training.reports import learning_signal
from flowgrpo.training.reports.samples import SampleFolder
from flowgrpo.training.reports.tree_store import TreeFolder
from flowgrpo.training.run import random_states
from flowgrpo.training.run.background import Background
from flowgrpo.training.run.run_folder import next_free_folder
from flowgrpo.training.run.stop_reasons import Diverged, Stopped
from flowgrpo.training.state import RunState
from flowgrpo.training.wing import Wing


class RunCheckpoints:
    """The checkpoints of a run; all processes call each method together.

    Args:
        background: writes them.
        samples, trees: forget what comes after the checkpoint that a resume goes back to.
    """

    def __init__(self, run: RunState, wing: Wing, *, background: Background, samples: SampleFolder, trees: TreeFolder):
        self._run, self._wing, self._background = run, wing, background
        self._samples, self._trees = samples, trees
        self._damaged: str | None = None  # what is wrong with checkpoints that a resume passed over
        self._found: str | None = None  # what a resume goes on from
        peers = agreement.of_first(run.roles.trainers)
        self._writer = snapshot.Writer(
            run.checkpoint_folder, background, keep=run.config.run.checkpoint.keep, peers=peers
        )

    def announce(self) -> None:
        """Say what a resume goes on from."""
        if self._damaged is not None:
            self._run.report.warn(self._damaged)
        elif self._found is not None:
            self._run.report.say(self._found)

    def mark_start(self) -> None:
        """Note that the run has no checkpoint yet."""
        if self._run.accelerator.is_main_process:
            resume.mark_start(self._run.checkpoint_folder)

    def save(self) -> None:
        """Begin to write a checkpoint of the finished iterations, once the one before is written.

        Raises:
            Diverged: the weights are not finite; nothing is written.
            Exception: the one before could not be written.
        """
        run = self._run
        self._writer.wait()
        broken = sum(not bool(local(tensor).isfinite().all()) for tensor in run.weights.tensors().values())
        if run.collectives.sum(torch.tensor(float(broken))) > 0:
            run.report.warn(f"step {run.done}: the trained weights are not finite")
            raise Diverged(
                f"stopped after step {run.done}: the trained weights are not finite", *self.advise_after_damage()
            )
        states = run.collectives.gather([random_states.random_state()])
        taken = snapshot.take(
            run.done,
            weights=run.weights,
            optimizer=run.optimizer,
            scaler=run.scaler,
            random_states=states,
            beta=run.beta,
            prompt_stats=run.prompt_stats.state(),
            versions=run.versions,
            rollout=self._wing.rollout_state(),
            own=self._wing.kept_graphs.state(),
            first=self._writer.peers.first,
        )
        self._writer.begin(taken, partial(self._is_sound, run.done))

    def save_if_missing(self) -> None:
        """Begin to write a checkpoint of the finished iterations unless there is a sound one."""
        self._background.wait()
        run = self._run
        there, *_ = run.collectives.gather([checkpoint.latest(run.checkpoint_folder) == run.done])
        if run.done and not there:
            self.save()

    @contextmanager
    def save_on(self, kind: type[Stopped]) -> Iterator[None]:
        """Save what is done if the run stops for this reason inside the context, and tell the error where it rests."""
        try:
            yield
        except kind as stopped:
            self.save_if_missing()
            stopped.rest = self.describe_rest()
            raise

    def resume(self) -> None:
        """Go back to a checkpoint of the folder (`checkpoint.choose`), or to the start, and forget what came after.

        Raises:
            InputError: processes see different checkpoints.
        """
        run = self._run
        choice = checkpoint.choose(run.checkpoint_folder)
        step, self._damaged = choice.step, choice.warning
        self._found = resume.describe_resume(step, run.report.lines)
        if len({*gather_object([step])}) > 1:  # over all processes, generators and evaluators too
            raise InputError(
                f"run.resume: processes see different checkpoints in {run.checkpoint_folder}; look at its disk"
            )
        if step is not None:
            found = checkpoint.find(run.checkpoint_folder, step)
            run.done, run.beta, prompt_stats = checkpoint.load(
                found,
                weights=run.weights,
                optimizer=run.optimizer,
                scaler=run.scaler,
                versions=run.versions,
                process=run.accelerator.process_index,
            )
            run.prompt_stats.restore(prompt_stats)
            self._wing.restore_rollout_state(checkpoint.rollout_state(found))
            self._wing.kept_graphs.restore(checkpoint.own_state(found))
        run.accelerator.wait_for_everyone()  # nobody deletes a checkpoint before all have looked at it
        kept_until = run.done or -1  # a run from the start makes the evaluation of step 0 again
        run.report.forget_after(kept_until)
        if run.accelerator.is_main_process:
            self._samples.forget_after(kept_until)
            self._trees.forget_after(run.done)
            checkpoint.forget_after(run.checkpoint_folder, run.done)

    def describe_rest(self) -> str:
        """Return which checkpoint a resume goes on from, once it is written, as the head of the command."""
        self._background.wait()
        return checkpoint.describe_rest(self._run.checkpoint_folder, self._run.done)

    def advise_after_damage(self) -> tuple[str, list[str]]:
        """Return head and end of the command that goes on with a run whose weights cannot be trusted."""
        checkpoints = self._run.checkpoint_folder
        rest, step = self.describe_rest(), checkpoint.latest(checkpoints)
        if step is not None and checkpoint.is_sound(checkpoint.place_of(checkpoints, step)):
            return rest, ["run.resume=true"]
        rest, end = self.advise_new_run()
        return f"no checkpoint is sound, {rest}", end

    def advise_new_run(self) -> tuple[str, list[str]]:
        """Return head and end of the command that begins again in another folder."""
        return "mend that and begin again", [f"run.name={next_free_folder(self._run.folder).name}"]

    def _is_sound(self, step: int) -> bool:
        return learning_signal.is_sound([line for line in self._run.report.lines if line["step"] == step])
