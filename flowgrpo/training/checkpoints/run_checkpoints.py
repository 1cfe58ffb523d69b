"""Checkpoints of a run: written in the background, and loaded on a resume."""

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
    """The checkpoints of a run. All processes call each method together.

    On a resume, the files of later iterations in `samples` and `trees` are deleted.
    """

    def __init__(self, run: RunState, wing: Wing, *, background: Background, samples: SampleFolder, trees: TreeFolder):
        self._run, self._wing, self._background = run, wing, background
        self._samples, self._trees = samples, trees
        self._damaged: str | None = None  # a warning about damaged checkpoints that the resume skipped
        self._origin: str | None = None  # describes from where the run resumes
        peers = agreement.of_first(run.roles.trainers)
        self._writer = snapshot.Writer(
            run.checkpoint_folder, background, keep=run.config.run.checkpoint.keep, peers=peers
        )

    def announce(self) -> None:
        """Report from where the run resumes, if it does; warn about damaged checkpoints."""
        if self._damaged is not None:
            self._run.report.warn(self._damaged)
        elif self._origin is not None:
            self._run.report.say(self._origin)

    def mark_start(self) -> None:
        """Note that the run has no checkpoint yet."""
        if self._run.accelerator.is_main_process:
            resume.mark_start(self._run.checkpoint_folder)

    def save(self) -> None:
        """Begin to write a checkpoint of the finished iterations, once the previous checkpoint is written.

        Raises Diverged if the weights are not finite, or the error of the last write.
        """
        run = self._run
        self._writer.wait()
        broken = sum(not bool(local(tensor).isfinite().all()) for tensor in run.weights.tensors().values())
        if run.collectives.sum(torch.tensor(float(broken))) > 0:
            run.report.warn(f"step {run.done}: the trained weights are not finite")
            raise Diverged(
                f"stopped after step {run.done}: the trained weights are not finite", *self.advise_after_damage()
            )
        states, memory = run.collectives.gather([random_states.random_state()]), self._wing.rollout_memory
        taken = snapshot.take(
            run.done,
            weights=run.weights,
            optimizer=run.optimizer,
            scaler=run.scaler,
            random_states=states,
            beta=run.beta,
            prompt_stats=run.prompt_stats.state(),
            versions=run.versions,
            memory=run.memory,
            rollout=self._wing.rollout_state(),
            tensors=memory.state() if memory is not None else {},
            own=self._wing.kept_graphs.state(),
            first=self._writer.peers.first,
        )
        self._writer.begin(taken, partial(self._is_sound, run.done))

    def save_if_missing(self) -> None:
        """Begin to write a checkpoint of the finished iterations, unless a sound one of them exists."""
        self._background.wait()
        run = self._run
        there, *_ = run.collectives.gather([checkpoint.latest(run.checkpoint_folder) == run.done])
        if run.done and not there:
            self.save()

    @contextmanager
    def save_on(self, kind: type[Stopped]) -> Iterator[None]:
        """Return a context that saves the finished iterations if the run stops in it for the reason `kind`.

        The error then names this checkpoint as the one to resume from.
        """
        try:
            yield
        except kind as stopped:
            self.save_if_missing()
            stopped.rest = self.describe_rest()
            raise

    def resume(self) -> None:
        """Load the latest usable checkpoint (`checkpoint.choose`), if any, and delete all files of later iterations.

        Raises InputError if processes see different checkpoints.
        """
        run = self._run
        choice = checkpoint.choose(run.checkpoint_folder)
        step, self._damaged = choice.step, choice.warning
        self._origin = resume.describe_resume(step, run.config.train.iterations, run.report.lines)
        if len({*gather_object([step])}) > 1:  # over all processes, generators and evaluators too
            raise InputError(
                f"run.resume: processes see different checkpoints in {run.checkpoint_folder}; look at its disk"
            )
        if step is not None:
            path = checkpoint.find(run.checkpoint_folder, step)
            run.done, run.beta, prompt_stats = checkpoint.load(
                path,
                weights=run.weights,
                optimizer=run.optimizer,
                scaler=run.scaler,
                versions=run.versions,
                process=run.accelerator.process_index,
            )
            run.prompt_stats.restore(prompt_stats)
            run.memory = checkpoint.baseline_memory(path)
            self._wing.restore_rollout_state(checkpoint.rollout_state(path))
            if self._wing.rollout_memory is not None:
                self._wing.rollout_memory.restore(checkpoint.rollout_tensors(path))
            self._wing.kept_graphs.restore(checkpoint.own_state(path))
        run.accelerator.wait_for_everyone()  # all processes must have read the checkpoints before any is deleted
        kept_until = run.done or -1  # without a checkpoint, the evaluation of step 0 is repeated too
        run.report.forget_after(kept_until)
        if run.accelerator.is_main_process:
            self._samples.forget_after(kept_until)
            self._trees.forget_after(run.done)
            checkpoint.forget_after(run.checkpoint_folder, run.done)

    def describe_rest(self) -> str:
        """Wait until the checkpoint is written; return its description for the user, see `checkpoint.describe_rest`."""
        self._background.wait()
        return checkpoint.describe_rest(self._run.checkpoint_folder, self._run.done)

    def advise_after_damage(self) -> tuple[str, list[str]]:
        """Return advice for a run whose weights cannot be trusted: a phrase, and options to append to the command."""
        checkpoints = self._run.checkpoint_folder
        rest, step = self.describe_rest(), checkpoint.latest(checkpoints)
        if step is not None and checkpoint.is_sound(checkpoint.place_of(checkpoints, step)):
            return rest, ["run.resume=true"]
        rest, end = self.advise_new_run()
        return f"no checkpoint is sound, {rest}", end

    def advise_new_run(self) -> tuple[str, list[str]]:
        """Return the advice to begin again in another folder: a phrase, and options to append to the command."""
        return "mend that and begin again", [f"run.name={next_free_folder(self._run.folder).name}"]

    def _is_sound(self, step: int) -> bool:
        return learning_signal.is_sound([line for line in self._run.report.lines if line["step"] == step])
