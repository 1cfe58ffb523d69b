"""The one loop: rollout -> score -> credit -> update -> log -> checkpoint.

It asks a policy for velocities, the five axes for a plan, units, advantages and a loss, and never which method that is.
"""

from __future__ import annotations

import json
import math
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from flowgrpo import checkpoint, selection, switches
from flowgrpo.advantage import combined, zero_std_fraction
from flowgrpo.config import Config
from flowgrpo.credit import Units, calibrated, step_signs, trunk_ends
from flowgrpo.errors import InputError
from flowgrpo.evaluate import SampleFolder, evaluate, weighted
from flowgrpo.groups import Groups, groups_of
from flowgrpo.history import History
from flowgrpo.policy import Policy, Row
from flowgrpo.prompts import Prompt
from flowgrpo.report import Report, peak_bytes
from flowgrpo.rollout import Rollout, drafted, rollout
from flowgrpo.update import Credited, Measured, step
from flowgrpo.watch import parted
from flowgrpo.weights import Weights
from rewards import Reward
from samplers import noise
from samplers.trees import Root, pruned

CALIBRATION = "calibration.json"


class Interrupted(Exception):
    """The run was asked to stop, and stopped after a whole iteration with a checkpoint of step `step`."""

    def __init__(self, step: int):
        super().__init__(f"interrupted after step {step}")
        self.step = step


class Trainer:
    """One run over a policy.

    Args:
        config: numbers and choices.
        policy: what is trained; its modules get adapters or are unfrozen here.
        rewards: trained on, by their weighted sum.
        train_prompts, eval_prompts: rows of prompts; without eval prompts nothing is evaluated.
        eval_rewards: watched only.
        folder: the run's folder, which exists.
    """

    def __init__(
        self,
        config: Config,
        policy: Policy,
        weights: Weights,
        rewards: Sequence[Reward],
        train_prompts: Sequence[Prompt],
        eval_prompts: Sequence[Prompt] = (),
        eval_rewards: Sequence[Reward] = (),
        folder: Path | None = None,
        accelerator: Accelerator | None = None,
    ):
        self.config, self.policy, self.weights = config, policy, weights
        self.rewards, self.eval_rewards = list(rewards), list(eval_rewards)
        self.train_prompts, self.eval_prompts = train_prompts, eval_prompts[: config.eval.prompts]
        self.training_call = switches.training_call(config.model, policy)
        guided = {name: policy.call.get(name) for name in self.training_call}
        self.eval_call = {**guided, **config.eval.call}  # evaluation is guided as the pipeline's user would have it
        self.folder = folder or config.run.folder
        self.accelerator = accelerator or Accelerator()
        settings = config.train.optimizer
        self.optimizer = torch.optim.AdamW(
            weights.parameters,
            lr=config.train.learning_rate,
            betas=tuple(settings.betas),
            eps=settings.eps,
            weight_decay=settings.weight_decay,
        )
        # Half a float's range is too small for gradients; for float32 and bfloat16 this multiplies by nothing.
        self.scaler = torch.amp.GradScaler(self.accelerator.device.type, enabled=config.model.dtype == "float16")
        self.reward_weights = torch.tensor([reward.weight for reward in rewards], dtype=torch.float64)
        self.done = 0  # iterations
        self.history = History(config.train.memory)
        self.beta = config.algorithm.objective.kl.beta  # may adapt
        self.levels: list[float] | None = None  # of the kernel's noise, where they are calibrated
        self.report = Report(self.folder, self.accelerator, config.train.iterations)
        self.samples = SampleFolder(self.folder)

    def resume(self) -> None:
        """Go back to the latest checkpoint of the folder, or to the start if it has none, and forget what came after."""
        checkpoints = self.folder / "checkpoints"
        if checkpoint.steps(checkpoints):
            latest = checkpoint.find(checkpoints)
            self.done, self.beta, history = checkpoint.load(
                latest, self.weights, self.optimizer, self.scaler, self.accelerator.process_index
            )
            self.history.restore(history)
        self.report.forget_after(self.done if self.done else -1)
        if self.accelerator.is_main_process:
            self.samples.forget_after(self.done if self.done else -1)

    def run(self) -> None:
        """Train to the last iteration.

        Raises:
            Interrupted: Ctrl-C or SIGTERM came; the iteration was finished and a checkpoint written.
        """
        with self.policy.calling(**self.training_call):
            self._prepare()
            self._loop()

    def _loop(self) -> None:
        train, run = self.config.train, self.config.run
        with self.report, _stop_requests() as stop:
            self.report.start(self.done)
            if self.config.algorithm.kernel.calibrate is not None:
                self._calibrate()
            if self.done == 0:
                self._evaluate()
            while self.done < train.iterations:
                line = self._iterate()
                self.done += 1
                self.report.write({"step": self.done, "phase": "train", **line})
                last = self.done == train.iterations
                if self.done % self.config.eval.every == 0 or last:
                    self._evaluate()
                stopping = bool(self._sum(torch.tensor(float(stop.is_set))) > 0)
                if self.done % run.checkpoint.every == 0 or last or stopping:
                    self._checkpoint()
                if stopping and not last:
                    raise Interrupted(self.done)

    @torch.no_grad()
    def _prepare(self) -> None:
        """Encode what this process will meet."""
        rank, processes = self.accelerator.process_index, self.accelerator.num_processes
        with self.policy.calling(**self.eval_call):
            self.policy.prepare([Row(p.text, 0, p.columns) for p in self.eval_prompts[rank::processes]])
        calibration = self.config.algorithm.kernel.calibrate
        before = 0 if calibration is None or self.done else calibration.rounds  # iterations that come before the first
        to_come = range(self.done - before, self.config.train.iterations)
        if self.config.prompts.pick.by == "shuffle":
            places = [place for i in to_come for place in self._groups(i).prompts[rank::processes]]
        else:
            places = range(len(self.train_prompts))  # which of them nobody knows yet
        rows = [self._row(place, 0) for place in dict.fromkeys(places)]
        self.policy.prepare(rows)
        self.policy.start(rows[:1])  # the sigmas are known from here on
        self.policy.rest()

    def _row(self, place: int, seed: int) -> Row:
        prompt = self.train_prompts[place]
        return Row(prompt.text, seed, prompt.columns)

    def _groups(self, iteration: int) -> Groups:
        return groups_of(self.config, len(self.train_prompts), self.history, iteration)

    def _iterate(self) -> dict[str, Any]:
        config = self.config
        started, evaluations = time.perf_counter(), self.policy.evaluations
        groups = self._groups(self.done)
        rolled = self._rollout(self.done, groups)
        decoded = len(rolled.tree.leaves) + self._drafts(groups)
        rollout_evaluations = self.policy.evaluations - evaluations
        rolled_out = time.perf_counter()
        credited, seen = self._credit(rolled, groups)
        measured = []
        for part in range(config.train.updates):
            measured.append(
                step(
                    self.policy,
                    self.weights,
                    self.optimizer,
                    config.algorithm.objective,
                    credited,
                    part,
                    config.train.max_grad_norm,
                    self._sum,
                    self.scaler,
                )
            )
        update_evaluations = self.policy.evaluations - evaluations - rollout_evaluations
        moved = self._policy_metrics(measured)
        self.beta = config.algorithm.objective.kl.adapted(self.beta, moved["policy/kl"])
        return {
            **seen,
            **moved,
            **self._counts(rollout_evaluations, update_evaluations, measured, decoded),
            "time/rollout": rolled_out - started,
            "time/reward": rolled.scores.seconds,
            "time/update": time.perf_counter() - rolled_out,
            "memory/peak_bytes": peak_bytes(self.accelerator.device),
        }

    def _rollout(self, iteration: int, groups: Groups) -> Rollout:
        config, algorithm = self.config, self.config.algorithm
        kernels = algorithm.kernel.kernels(len(self.policy.sigmas) - 1, self.levels)
        return rollout(
            self.policy,
            algorithm.tree.plan(kernels, config.train.group_size, config.run.seed, iteration),
            self._roots(iteration, groups),
            self.rewards,
            config.train.micro_batch,
            config.run.seed,
            iteration,
            algorithm.objective.needs_old_means,
        )

    def _calibrate(self) -> None:
        """Find the noise level of each step, or take it from the run's folder, where it is kept."""
        kept = self.folder / CALIBRATION
        settings, started, evaluations = (
            self.config.algorithm.kernel.calibrate,
            time.perf_counter(),
            self.policy.evaluations,
        )
        if kept.is_file():
            found = json.loads(kept.read_text())
            self.levels = found["levels"]
            if not self.done:  # the line of a run that was killed before its first checkpoint was dropped
                self.report.write(found["metrics"])
            return
        if self.done:
            raise InputError(f"run.resume: {kept} is missing, which holds the noise levels that the run began with")
        self.levels = [kernel.level for kernel in self.config.algorithm.kernel.kernels(len(self.policy.sigmas) - 1)]
        rounds, decoded = [], 0
        for past in range(settings.rounds):
            iteration = past - settings.rounds  # before iteration 0, with noise of its own
            groups = self._groups(iteration)
            rolled = self._rollout(iteration, groups)
            decoded += len(rolled.tree.leaves) + self._drafts(groups)
            signs = step_signs(rolled.tree, combined(rolled.scores.values, self.reward_weights))
            positive, negative = self._sum(signs)
            rounds.append({"levels": self.levels, "positive": positive.tolist(), "negative": negative.tolist()})
            highest = 1.0 if self.config.algorithm.kernel.name == "cps" else math.inf
            self.levels = calibrated(self.levels, positive, negative, settings.step, settings.balance, highest)
        own = torch.tensor([self.policy.evaluations - evaluations, decoded], dtype=torch.float64)
        evaluated, decoded = (int(n) for n in self._sum(own))
        line = {
            "step": 0,
            "phase": "calibration",
            "cost/model_evaluations": evaluated,
            "cost/decoded": decoded,
            "time/calibration": time.perf_counter() - started,
        }
        if self.accelerator.is_main_process:
            partial = kept.with_suffix(".partial")
            partial.write_text(json.dumps({"levels": self.levels, "rounds": rounds, "metrics": line}, indent=1) + "\n")
            os.replace(partial, kept)
        self.report.write(line)

    def _roots(self, iteration: int, groups: Groups) -> list[Root]:
        """This process's roots of the iteration. Groups are integers, and every process has as many of each part."""
        train, processes = self.config.train, self.accelerator.num_processes
        return [
            Root(group, index, row, group * train.updates // train.groups)
            for group in range(self.accelerator.process_index, train.groups, processes)
            for index, row in enumerate(self._starts(iteration, group, groups))
        ]

    def _starts(self, iteration: int, group: int, groups: Groups) -> list[Row]:
        """The rows of a group's roots."""
        train, place, number = self.config.train, groups.prompts[group], groups.roots[group]
        shared = self.config.algorithm.tree.start == "shared"

        def row(start: int) -> Row:
            return self._row(place, noise.seed(self.config.run.seed, "start", iteration, group, start))

        if train.draft is None:
            return [row(0 if shared else index) for index in range(number)]
        pool = [row(start) for start in range(train.draft.pool * number)]
        with self.policy.calling(**train.draft.call):
            return drafted(self.policy, pool, self.rewards, self.reward_weights, number, train.micro_batch)

    def _drafts(self, groups: Groups) -> int:
        """How many samples this process drafts for the groups of an iteration."""
        own = sum(groups.roots[self.accelerator.process_index :: self.accelerator.num_processes])
        return 0 if self.config.train.draft is None else own * self.config.train.draft.pool

    def _credit(self, rolled: Rollout, groups: Groups) -> tuple[Credited, dict[str, Any]]:
        """Advantages over the units of all processes, and what the rewards looked like."""
        config, algorithm, tree = self.config, self.config.algorithm, rolled.tree
        units = algorithm.credit.units(tree, rolled.scores.values, self.reward_weights)
        places = trunk_ends(tree)
        ends, of_ends = rolled.scores.values[places], [tree.nodes[tree.leaves[i]].root.group for i in places]
        everyone = gather_object([(units, ends, of_ends, rolled.scores.lost)])
        together = Units.joined([own[0] for own in everyone])
        prompts = torch.tensor(groups.prompts)[together.comparison[:, 0]].tolist()
        expected = self.history.expected(prompts, self.done)
        weights, select = self.reward_weights, config.train.select
        advantages, trained = selection.judged(together, weights, expected, algorithm.baseline, select)
        before = sum(len(own[0].values) for own in everyone[: self.accelerator.process_index])
        mine = slice(before, before + len(units.values))

        rewards, of_ends = torch.cat([own[1] for own in everyone]), [group for own in everyone for group in own[2]]
        total = combined(rewards, self.reward_weights)
        self.history.add([groups.prompts[group] for group in of_ends], total, self.done)
        named = {f"reward/{r.name}/mean": _mean(rewards[:, k]) for k, r in enumerate(self.rewards)}
        finite = total[total.isfinite()]
        seen = {
            "reward/mean": _mean(total),
            "reward/std": float(finite.std(correction=0)) if len(finite) else None,
            **named,
            "reward/lost": int(sum(own[3].sum() for own in everyone)),
            "groups/zero_std_fraction": zero_std_fraction(combined(together.values, weights), together.comparison),
            "groups/left_out_fraction": float((~trained).double().mean()),
        }
        known = units.values.isfinite().any(1)
        weight = units.weight * groups.weights[units.comparison[:, 0]] * known  # a lost sample's edges weigh nothing
        step_weights = algorithm.objective.weights(tree.trained_steps, tree.sigma_cap)
        credited = Credited(tree, replace(units, weight=weight), advantages[mine], step_weights, self.beta)
        keep = algorithm.tree.pruned(tree, units.to_edges(advantages[mine].where(known, torch.nan)))
        if not trained.all():
            kept = units.to_edges(trained[mine])
            keep = kept if keep is None else keep & kept
        if keep is not None:
            credited = replace(credited, tree=pruned(tree, keep, config.train.micro_batch))
        return credited, seen

    def _policy_metrics(self, measured: list[Measured]) -> dict[str, Any]:
        everyone = gather_object([measured])
        every = [m for own in everyone for m in own]
        edges = max(1, sum(m.edges for m in every))
        kls = [m.kl for m in every if m.kl is not None]
        return {
            "policy/max_abs_log_ratio": float(torch.tensor([own[0].drift for own in everyone]).max()),
            "policy/mean_abs_log_ratio": sum(m.ratio for m in every) / edges,
            "policy/clip_fraction": sum(m.clipped for m in every) / edges,
            "policy/kl": sum(kls) / edges if kls else None,
            "policy/grad_norm": float(torch.tensor([m.grad_norm for m in measured]).max()),
            "policy/skipped_updates": sum(m.skipped for m in measured),
        }

    def _counts(self, rolled: int, updated: int, measured: list[Measured], leaves: int) -> dict[str, int]:
        own = torch.tensor([rolled, updated, sum(m.edges for m in measured), leaves], dtype=torch.float64)
        rolled, updated, edges, leaves = (int(n) for n in self._sum(own))
        return {
            "cost/model_evaluations": rolled + updated,
            "cost/rollout_evaluations": rolled,
            "cost/update_evaluations": updated,
            "cost/trained_edges": edges,
            "cost/decoded": leaves,
        }

    def _evaluate(self) -> None:
        if not self.eval_prompts:
            return
        started, random_state = time.perf_counter(), checkpoint.random_state()
        evaluations = self.policy.evaluations
        with self.weights.averaged(), self.policy.calling(**self.eval_call):
            samples = evaluate(
                self.policy,
                self.eval_prompts,
                [*self.rewards, *self.eval_rewards],
                self.config.train.micro_batch,
                self.accelerator,
                keep=self.config.eval.save,
            )
        checkpoint.set_random_state(random_state)  # how often one looks must not change what is trained
        totals = torch.tensor([_nan(weighted(sample, self.rewards)) for sample in samples], dtype=torch.float64)
        named = {
            f"reward/{r.name}/mean": _mean(torch.tensor([_nan(sample.rewards[r.name]) for sample in samples]))
            for r in (*self.rewards, *self.eval_rewards)
        }
        finite = totals[totals.isfinite()]
        self.report.write(
            {
                "step": self.done,
                "phase": "eval",
                "reward/mean": _mean(totals),
                "reward/std": float(finite.std(correction=0)) if len(finite) else None,
                **named,
                "cost/model_evaluations": int(self._sum(torch.tensor(self.policy.evaluations - evaluations))),
                "cost/decoded": len(samples),
                "time/eval": time.perf_counter() - started,
            }
        )
        self._watch()
        if self.accelerator.is_main_process:
            self.samples.write(samples, self.done)

    def _watch(self) -> None:
        """Warn of watched rewards that fall while the trained one rises."""
        lines = [line for line in self.report.lines if line["phase"] == "eval"]
        trained = [line["reward/mean"] for line in lines]
        for reward in self.eval_rewards:
            times = parted(trained, [line.get(f"reward/{reward.name}/mean") for line in lines])
            if times >= self.config.eval.watch:
                self.report.warn(
                    f"step {self.done}: the reward rose and {reward.name!r}, which is only watched, fell {times} "
                    "evaluations in a row; look at the samples, the reward may be exploited"
                )

    def _checkpoint(self) -> None:
        states = gather_object([checkpoint.random_state()])
        if self.accelerator.is_main_process:
            folder, keep = self.folder / "checkpoints", self.config.run.checkpoint.keep
            checkpoint.save(
                folder,
                self.done,
                self.weights,
                self.optimizer,
                self.scaler,
                states,
                self.beta,
                self.history.state(),
                keep,
            )
        self.accelerator.wait_for_everyone()

    def _sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the processes."""
        if self.accelerator.num_processes == 1:
            return tensor
        return self.accelerator.reduce(tensor.to(self.accelerator.device), "sum")


class _Stop:
    is_set = False


@contextmanager
def _stop_requests() -> Iterator[_Stop]:
    """Note Ctrl-C and SIGTERM instead of dying of them; the second Ctrl-C interrupts at once."""
    stop = _Stop()

    def ask(number: int, frame: object) -> None:
        if stop.is_set and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop.is_set = True

    try:
        before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not in the main thread, where nobody presses Ctrl-C
        before = {}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _nan(value: float | None) -> float:
    return float("nan") if value is None else value


def _mean(values: torch.Tensor) -> float | None:
    """Mean of the finite values; None if there is none."""
    finite = values[values.isfinite()]
    return float(finite.mean()) if len(finite) else None
