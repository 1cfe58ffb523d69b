"""The training loop of every kind of model, in `Loop.run` and `Loop.iterate`:

rollout -> units -> advantages -> update -> log -> evaluate -> checkpoint

The loop owns this order, and what does not depend on the model: groups, advantages, metrics, evaluation and checkpoints.
What depends on it, `rollout`, `units`, `update` and `eval_samples`, a kind supplies, see `training.steps`:
`flowgrpo.flow.trainer` for images, videos and sounds, `flowgrpo.mdlm.trainer` for texts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from flowgrpo.data.prompts import Prompt
from flowgrpo.errors import InputError
from flowgrpo.schema.sections import RunConfig
from flowgrpo.training.advantages import unit_selection
from flowgrpo.training.advantages.baseline import combined, zero_std_fraction
from flowgrpo.training.advantages.credit_units import CreditUnits
from flowgrpo.training.advantages.prompt_groups import Groups, groups_of
from flowgrpo.training.advantages.prompt_statistics import PromptStats
from flowgrpo.training.advantages.reward_combination import Combination
from flowgrpo.training.checkpoints import checkpoint, resume, snapshot
from flowgrpo.training.checkpoints.snapshot import Writer
from flowgrpo.training.distributed import agreement
from flowgrpo.training.distributed.assignment import Assignment, assign_roots
from flowgrpo.training.distributed.collectives import collectives_of
from flowgrpo.training.distributed.data_share import DataShard, data_shards
from flowgrpo.training.distributed.dtensors import local
from flowgrpo.training.distributed.worker_roles import roles_of
from flowgrpo.training.fitting.batch_sizes import ROLLOUT, BatchSizes
from flowgrpo.training.fitting.oom_retry import NoGraphs, Retrying
from flowgrpo.training.reports import learning_signal, metrics
from flowgrpo.training.reports.report import Report, peak_bytes
from flowgrpo.training.reports.samples import SampleFolder
from flowgrpo.training.reports.tree_store import KeptTree, TreeFolder
from flowgrpo.training.run import random_states
from flowgrpo.training.run.background import Background
from flowgrpo.training.run.phases import phase
from flowgrpo.training.run.run_folder import free
from flowgrpo.training.run.stop_reasons import Broken, Diverged, Interrupted, NothingToLearn, StopRequest, stop_requests
from flowgrpo.training.scoring.rollout_batch import Batch, Made
from flowgrpo.training.steps import Steps
from flowgrpo.training.weights import optimizers
from flowgrpo.training.weights.policy_versions import Versions
from flowgrpo.training.weights.trained_weights import Weights
from flowgrpo.training.workers.async_evaluation import AsyncEvaluation
from flowgrpo.training.workers.async_rollout import AsyncRollout
from rewards import Reward


class Loop(Steps):
    """The state of one run, and the order of its iterations.

    Args:
        config: numbers and choices.
        weights: what is trained.
        rewards: trained on, together.
        train_prompts, eval_prompts: rows of prompts; without eval prompts nothing is evaluated.
        eval_rewards: watched only.
        folder: the run's folder, which exists.
        shares: of the data, which this process works on: one, or those that a generator works on.

    Attributes:
        roles: of all processes.
        share: of the data, which this process works on now.
        done: iterations so far.
        combination: of the rewards.
        batch_sizes: those that the run finds, which take the place of `auto` in `config` when it starts.
        retrying: makes work again that runs out of memory.
        background: writes what the next iteration need not wait for; empty, and its errors raised, when `run` returns.
        after_evaluation: called with the folder, on the main process in the background, once the samples of an evaluation
            are written.
    """

    def __init__(
        self,
        config: RunConfig,
        weights: Weights,
        *,
        rewards: Sequence[Reward],
        train_prompts: Sequence[Prompt],
        eval_prompts: Sequence[Prompt] = (),
        eval_rewards: Sequence[Reward] = (),
        folder: Path | None = None,
        accelerator: Accelerator | None = None,
        shares: Sequence[DataShard] | None = None,
    ):
        self.config, self.weights = config, weights
        self.rewards, self.eval_rewards = list(rewards), list(eval_rewards)
        self.train_prompts, self.eval_prompts = train_prompts, eval_prompts[: config.eval.prompts]
        self.folder, self.accelerator = folder or config.run.folder, accelerator or Accelerator()
        self.roles = roles_of(config.run, self.accelerator.num_processes)
        self.shares = shares or data_shards(self.accelerator, config.run.context_parallel, self.roles)
        self.share = self.shares[0]
        self.generating = AsyncRollout(self, self.roles) if self.roles.generators else None
        self.evaluating = AsyncEvaluation(self, self.roles)
        self.collectives = collectives_of(self.accelerator, self.share, weights.lockstep, self.roles)
        groups = self.parameter_groups()
        self.learning_rates = [group.get("lr", config.train.learning_rate) for group in groups]
        self.optimizer = optimizers.build(config.train, groups)
        # Half a float's range is too small for gradients; for float32 and bfloat16 this multiplies by nothing.
        self.scaler = torch.amp.GradScaler(self.accelerator.device.type, enabled=config.model.dtype == "float16")
        self.combination = Combination.of(self.rewards, config.algorithm.baseline)
        # What is trained on, which a kind may take from elsewhere; the rewards are those of evaluations, too.
        self.reward_names, self.credited = [reward.name for reward in self.rewards], self.combination
        self.done = 0
        self._damaged: str | None = None  # what is wrong with the checkpoints that a resume passed over
        self._found: str | None = None  # what a resume goes on from
        self.prompt_stats, self.versions = PromptStats(config.train.half_life), Versions(weights, config.run.staleness)
        self.beta = config.algorithm.objective.kl.beta  # may adapt
        self.report = Report(self.folder, self.accelerator, config.train.iterations)
        self.samples, self.trees = SampleFolder(self.folder), TreeFolder(self.folder)
        self.checkpoints, self.batch_sizes = self.folder / "checkpoints", BatchSizes(self)
        self.retrying, self.kept_graphs = Retrying(self), NoGraphs()
        self.background = Background()
        group = agreement.of_first(self.roles.trainers)
        self._writer = Writer(self.checkpoints, self.background, keep=config.run.checkpoint.keep, peers=group)
        self.after_evaluation: Callable[[Path], object] = lambda folder: None

    def run(self) -> None:
        """Train to the last iteration.

        Raises:
            Interrupted: Ctrl-C or SIGTERM came in an iteration, which was finished, and a checkpoint written.
            OutOfMemory: memory ran out.
            NothingToLearn: the last `run.patience` iterations, or all there are, had no advantage or no update; a checkpoint
                was written.
            Diverged: a checkpoint was due, and the weights are not finite; none was written.
            Broken: all iterations are done, and the samples seen last have no rewards, or could not be learnt from.
        """
        generating, evaluating = self.generating, self.evaluating
        with self.report, self.background, self.retrying.named():
            self.report.start(self.done)
            if self._damaged is not None:
                self.report.warn(self._damaged)
            elif self._found is not None:
                self.report.say(self._found)
            train = self.config.train
            if train.ema is not None and train.ema.every > (steps := train.iterations * train.steps):
                self.report.warn(
                    "train.ema.every: the average of the weights, which evaluation, gallery and export use, moves after "
                    f"{train.ema.every} optimizer steps, but the run has {steps}; take {steps} or fewer"
                )
            self.batch_sizes.prepare()
            if generating is not None and generating.generates:
                with stop_requests():  # those that train decide
                    return generating.generate()
            if evaluating.evaluates:
                with stop_requests():
                    return evaluating.serve()
            with nullcontext() if generating is None else generating.ended(), evaluating.ended():
                self.on_start()
                if self.done == 0:
                    self.evaluate()
                    if self.accelerator.is_main_process:
                        resume.mark_start(self.checkpoints)
                with stop_requests() as stop:  # before, there is nothing to save, and Ctrl-C ends at once
                    self._iterations(stop)
                    self.background.wait()  # here, too, a SIGTERM does not break what is being written
                self._check_end()

    def _iterations(self, stop: StopRequest) -> None:
        """Take iterations until the last one, or until something stops the run; see `run`."""
        train, run = self.config.train, self.config.run
        empty = 0  # iterations in a row without anything to learn
        while self.done < train.iterations:
            line = self.iterate()
            self.done += 1
            self.report.write({"step": self.done, "phase": "train", **line})
            empty = empty + 1 if learning_signal.is_idle(line) else 0
            if empty:
                self.report.warn(f"step {self.done}: nothing to learn, {learning_signal.why(line)}")
            last, tired = self.done == train.iterations, empty == run.patience
            if self.done % self.config.eval.every == 0 or last:
                self.evaluate()
            stopping = bool(self.collectives.sum(torch.tensor(float(stop.is_set))) > 0)
            if self.done % run.checkpoint.every == 0 or last or stopping or tired:
                self.save_checkpoint()
            if tired:
                reason = f"nothing to learn since step {self.done - empty}, {learning_signal.why(line)}"
                raise NothingToLearn(f"stopped after step {self.done}: {reason}", self.rest())
            if stopping and not last:
                raise Interrupted(f"interrupted after step {self.done}", self.rest())

    def _check_end(self) -> None:
        """End a run badly that took all its iterations and has nothing to show for it; see `run`."""
        lines, patience = self.report.lines, self.config.run.patience
        verdicts = learning_signal.never_learnt(lines, patience), learning_signal.broken(lines, patience)
        (never, broken), *_ = self.collectives.gather([verdicts])  # the first process has all lines
        if never is not None:
            raise NothingToLearn(f"ended after step {self.done}: {never}", *self._another())
        if broken is not None:
            raise Broken(f"ended after step {self.done}: {broken}", *self._way_on())

    def iterate(self) -> dict[str, Any]:
        """Run one iteration and return its metrics."""
        started = time.perf_counter()
        self.versions.keep(self.done, self.prompt_stats.state())
        with phase("rollout"):  # of trees, or completions; decoded and scored
            made = None if self.generating is None else self.generating.received(self.done)
            made = made or self.made(self.done)
        batch, rolled, begun, rolled_out = made.batch, made.evaluations, self.evaluations, time.perf_counter()
        units = self.units(batch)  # what is compared
        advantages, trained, seen = self.advantages(units, batch)
        with phase("update"):
            stats = self.update(batch, units, advantages, trained)  # the optimizer steps
        self.retrying.agree(within=True)
        updated = self.evaluations - begun
        moved = metrics.of_policy(stats, self.collectives.gather_shares) | {
            "policy/learning_rate": float(self.optimizer.param_groups[0]["lr"])
        }
        self.on_updated(moved)
        costs = {
            "cost/model_evaluations": rolled + updated,
            "cost/rollout_evaluations": rolled,
            "cost/update_evaluations": updated,
            "cost/trained_edges": sum(each.edges for each in stats),
            "cost/decoded": batch.decoded,
        }
        return {
            **seen,
            **self.collectives.totals(batch.counts),
            **moved,
            **self.collectives.totals(costs),
            "time/rollout": rolled_out - started,
            "time/reward": batch.scores.seconds,
            **({} if self.generating is None else {"time/generate": made.seconds}),
            "time/update": time.perf_counter() - rolled_out,
            "memory/peak_bytes": peak_bytes(self.accelerator.device),
        }

    def made(self, iteration: int) -> Made:
        """Roll out this process's share of an iteration, by the weights that it is rolled out by."""
        started, evaluations = time.perf_counter(), self.evaluations
        with self.versions.rolling_out(iteration):
            rollout = partial(self.rollout, iteration, self.groups(iteration))
            batch = self.retrying.attempt(ROLLOUT, rollout, give_up=self.kept_graphs.give_up)
        return Made(batch, self.evaluations - evaluations, time.perf_counter() - started)

    def gather_rolled(self, objects: list[Any]) -> list[Any]:
        """The objects of all processes that roll out together: of this one alone, where there are generators."""
        return objects if self.generating is not None else self.collectives.gather_shares(objects)

    def groups(self, iteration: int) -> Groups:
        """The groups of an iteration, on all processes, by what was known of the prompts when its weights stood."""
        known = self.versions.known(iteration, self.prompt_stats)
        return groups_of(self.config, len(self.train_prompts), known, iteration)

    def assignment(self, iteration: int, groups: Groups) -> Assignment:
        """The roots of an iteration that this process grows, and those of the others."""
        return assign_roots(self.config, groups, iteration=iteration, share=self.share)

    def advantages(self, units: CreditUnits, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        """Compare the units of all processes, and return the advantages of this process's.

        Returns:
            of this process's units the advantages (U,) and whether (U,) they are trained on, and the rewards' metrics.
        """
        algorithm, groups = self.config.algorithm, batch.groups
        everyone = self.collectives.gather_shares([(units, *batch.outcomes, batch.scores.lost)])
        together, places = CreditUnits.joined([each[0] for each in everyone])
        mine = places[self.share.index]
        prompts = torch.tensor(groups.prompts)[together.comparison[:, 0]].tolist()
        expected = self.prompt_stats.expected(prompts, self.done)
        weights, select = self.credited.weights, self.config.train.select
        advantages, trained = unit_selection.normalize_advantages(
            together, weights, expected=expected, baseline=algorithm.baseline, select=select
        )
        rewards = torch.cat([each[1] for each in everyone])
        total = self.credited.total(rewards)
        self.prompt_stats.add([groups.prompts[group] for each in everyone for group in each[2]], total, self.done)
        self.on_compared(together)
        teaching = (
            trained & together.values.isfinite().any(1) & learning_signal.teaches(algorithm.objective, advantages)
        )
        return (
            advantages[mine],
            trained[mine],
            {
                **metrics.of_totals(total),
                **{f"reward/{name}/mean": metrics.mean(rewards[:, k]) for k, name in enumerate(self.reward_names)},
                "reward/lost": int(sum(each[3].sum() for each in everyone)),
                "groups/zero_std_fraction": zero_std_fraction(combined(together.values, weights), together.comparison),
                "groups/left_out_fraction": float((~trained).double().mean()),
                "groups/teaching": len(together.comparison[teaching, 0].unique()),
            },
        )

    def record_trees(self, parts: Sequence[KeptTree]) -> None:
        """Write the trees of an iteration that is due, in the background, from the parts of all processes."""
        asked = self.config.run.trees
        if asked is None or not asked.due(self.done, self.config.train.iterations):
            return
        everyone = self.collectives.gather_shares(list(parts))
        if self.accelerator.is_main_process:
            self.background.submit(partial(self.trees.write, everyone))

    def evaluate(self) -> None:
        """Have the evaluation prompts sampled with the averaged weights, and scored."""
        if self.eval_prompts:
            self.evaluating.evaluate()
            self.retrying.agree(within=False)

    def save_checkpoint(self) -> None:
        """Begin to write the checkpoint of the iterations that are done, once the one before is written.

        Raises:
            Diverged: the weights are not finite; nothing is written.
            Exception: the one before could not be written.
        """
        self._writer.wait()
        broken = sum(not bool(local(tensor).isfinite().all()) for tensor in self.weights.tensors().values())
        if self.collectives.sum(torch.tensor(float(broken))) > 0:
            self.report.warn(f"step {self.done}: the trained weights are not finite")
            raise Diverged(f"stopped after step {self.done}: the trained weights are not finite", *self._way_on())
        states = self.collectives.gather([random_states.random_state()])
        taken = snapshot.take(
            self.done,
            weights=self.weights,
            optimizer=self.optimizer,
            scaler=self.scaler,
            random_states=states,
            beta=self.beta,
            prompt_stats=self.prompt_stats.state(),
            versions=self.versions,
            rollout=self.rollout_state(),
            own=self.own_state(),
            first=self._writer.peers.first,
        )
        self._writer.begin(taken, partial(self._sound, self.done))

    def _sound(self, step: int) -> bool:
        return learning_signal.is_sound([line for line in self.report.lines if line["step"] == step])

    def keep_what_is_done(self) -> None:
        """Begin to write a checkpoint of the iterations that are done, unless there is one; on all processes together."""
        self.background.wait()
        there, *_ = self.collectives.gather([checkpoint.latest(self.checkpoints) == self.done])
        if self.done and not there:
            self.save_checkpoint()

    def rest(self) -> str:
        """Which checkpoint a resume goes on from, once it is written, as the head of the command."""
        self.background.wait()
        return checkpoint.rest(self.checkpoints, self.done)

    def _way_on(self) -> tuple[str, list[str]]:
        """What is left of a run whose weights cannot be trusted, as the head of a command, and the command's end."""
        rest, step = self.rest(), checkpoint.latest(self.checkpoints)
        if step is not None and checkpoint.is_sound(checkpoint.place_of(self.checkpoints, step)):
            return rest, ["run.resume=true"]
        rest, end = self._another()
        return f"no checkpoint is sound, {rest}", end

    def _another(self) -> tuple[str, list[str]]:
        return "mend that and begin again", [f"run.name={free(self.folder).name}"]

    def resume(self) -> None:
        """Go back to a checkpoint of the folder (`checkpoint.chosen`), or to the start, and forget what came after."""
        choice = checkpoint.chosen(self.checkpoints)
        step, self._damaged = choice.step, choice.warning
        self._found = resume.found(step, self.report.lines)
        if len({*gather_object([step])}) > 1:
            raise InputError(f"run.resume: processes see different checkpoints in {self.checkpoints}; look at its disk")
        if step is not None:
            self.done, self.beta, prompt_stats = checkpoint.load(
                checkpoint.find(self.checkpoints, step),
                weights=self.weights,
                optimizer=self.optimizer,
                scaler=self.scaler,
                versions=self.versions,
                process=self.accelerator.process_index,
            )
            self.prompt_stats.restore(prompt_stats)
            found = checkpoint.find(self.checkpoints, step)
            self.take_rollout_state(checkpoint.rollout_state(found))
            self.take_own_state(checkpoint.own_state(found))
        self.accelerator.wait_for_everyone()  # nobody deletes a checkpoint before all have looked at it
        self.report.forget_after(self.done if self.done else -1)
        if self.accelerator.is_main_process:
            self.samples.forget_after(self.done if self.done else -1)
            self.trees.forget_after(self.done)
            checkpoint.forget_after(self.checkpoints, self.done)

    def _set_learning_rate(self, number: int) -> None:
        """Set the learning rates of an iteration's optimizer step, counted from 0, by its number in the run alone."""
        train = self.config.train
        factor = train.schedule.factor(self.done * train.steps + number, train.iterations * train.steps)
        for group, rate in zip(self.optimizer.param_groups, self.learning_rates, strict=True):
            group["lr"] = rate * factor
